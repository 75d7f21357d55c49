"""``kernelize(model)``: this live model, in place, undoable.

plan -> emit -> import the emitted text -> bind it to this instance -> verify. What is tested is what is emitted, and
what runs: there is no other path.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import Graph

from . import apply as binding
from . import verify as judge
from .cost import Device, device_of
from .emit import EmitResult, emit, why_not
from .errors import ExportError, MatchError, UsageError, VerifyError
from .export import phase_inputs, site_of
from .folder_form import emitted_path
from .inventory import Inventory, load
from .pipeline import Outcome, find
from .plan import Policy
from .provenance import Provenance, record
from .report import Report

Model = TypeVar("Model", bound=nn.Module)

_BATCH, _SEQ = 2, 256
_reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()
_told_about_cpu = False


@dataclass(frozen=True)
class Capture:
    """One call of the model as it was captured and planned.

    Attributes:
        name: ``prefill``, ``decode``, ``padded prefill`` or ``call``.
        provenance: The record of the export.
        outcome: What the pass found that can be written in source form.
    """

    name: str
    provenance: Provenance
    outcome: Outcome


def kernelize(model: Model, *, inputs: Any = None, only: Collection[str] | None = None,
              skip: Collection[str] | None = None, strict: bool = False, verify: bool = True,
              compile: bool | Mapping[str, Any] | None = None, emit: str | Path | None = None) -> Model:  # noqa: A002  # fmt: skip
    """Put kernels where this model's own code computes what they compute.

    Only this instance changes: its modules become instances of emitted subclasses of their classes. Nothing of
    transformers is touched, state dicts keep their keys, and :func:`restore` puts everything back.

    Args:
        model: A causal language model of transformers, or any module together with ``inputs``.
        inputs: Sample inputs of a module that is none: a tensor, a tuple of positional or a dict of keyword ones.
        only: Use these Definitions only.
        skip: Leave these Definitions out.
        strict: Raise where nothing matches, instead of warning and returning the model as it is.
        verify: Compare the outputs with the original's before returning.
        compile: ``True``, or keyword arguments of ``torch.compile``, to compile the result in place.
        emit: A folder or file to write ``modeling_<model>.py`` to, the very text that is applied.

    Returns:
        The same model.

    Raises:
        ExportError: With ``strict``, if the model cannot be captured.
        MatchError: If an option names no Definition; with ``strict``, if nothing matches.
        VerifyError: If an output differs by more than rounding; the model has been put back.
    """
    restore(model)
    _tell_about_cpu(model)
    try:
        made, report = plan_source_form(model, inputs=inputs, only=only, skip=skip or ())
    except ExportError as error:
        return _unchanged(model, str(error), strict, error)
    if not made.text:
        return _unchanged(model, _why_nothing(report), strict, MatchError(_why_nothing(report)))
    if emit is not None:
        binding.save(made.text, emitted_path(emit, model))
    checks = _apply(model, made, inputs, verify)
    _reports[model] = report.with_checks(checks)
    if compile:
        model.compile(**({} if compile is True else dict(compile)))
    return model


def plan_source_form(model: nn.Module, *, inputs: Any = None, only: Collection[str] | None = None,
                     skip: Collection[str] = (), inventory: Inventory | None = None,
                     device: Device | None = None) -> tuple[EmitResult, Report]:  # fmt: skip
    """Capture, match and write: the emitted text and the report of what is in it, with nothing applied.

    Raises:
        ExportError: If the model cannot be captured in any phase.
        MatchError: If an option names no Definition.
    """
    inventory = inventory or load()
    device = device or device_of(_first_device(model))
    captures, problems = [], {}
    started = time.perf_counter()
    for name, args, kwargs in _calls(model, inputs, problems):
        captured = _capture(model, name, args, kwargs, inventory, Policy(device, only, skip), problems)
        if captured is not None:
            captures.append(captured)
    if not captures:
        raise ExportError(f"{type(model).__name__} cannot be captured: {'; '.join(problems.values())}")
    first, *others = captures
    made = emit(list(first.outcome.chosen), first.provenance, model,
                more=[(list(c.outcome.chosen), c.provenance) for c in others])  # fmt: skip
    outcomes = {c.name: c.outcome for c in captures}
    return made, Report.of(model, made, outcomes, problems, time.perf_counter() - started)


def _calls(model: nn.Module, inputs: Any, problems: dict[str, str]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The calls to capture: the user's own, or what ``generate()`` makes."""
    if inputs is not None:
        yield ("call", *split_inputs(inputs))
        return
    if not is_language_model(model):
        raise UsageError(f"{type(model).__name__} is no causal language model of transformers",
                         advice="Pass inputs=, a sample of what it is called with")  # fmt: skip
    seq = _sample_length(model)
    for name, phase, padded in (("prefill", "prefill", False), ("decode", "decode", False), ("padded prefill", "prefill", True)):
        try:
            yield name, (), phase_inputs(model, phase, _BATCH, seq, padded=padded)  # type: ignore[arg-type]
        except ExportError as error:
            problems[name] = str(error)


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``inputs=`` as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, list | tuple) else ((inputs,), {})


def is_language_model(model: nn.Module) -> bool:
    """Whether the module is a transformers model that gives logits for token ids."""
    return hasattr(model, "config") and hasattr(model, "generate") and model.get_output_embeddings() is not None


def _sample_length(model: nn.Module) -> int:
    config = model.config
    limits = [getattr(config, name, None) for name in ("n_positions", "max_position_embeddings")]
    return max(8, min([_SEQ, *(limit // 2 for limit in limits if isinstance(limit, int) and limit > 0)]))


def _capture(model: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inventory: Inventory,
             policy: Policy, problems: dict[str, str]) -> Capture | None:  # fmt: skip
    try:
        exported, provenance = record(model, args, kwargs)
    except ExportError as error:
        problems[name] = str(error)
        return None
    writable = Policy(policy.device, policy.only, policy.skip, lambda match: why_not(match, provenance))
    # The record speaks of the exported graph, so the pass works on a copy.
    return Capture(name, provenance, find(copied(exported.graph_module.graph), inventory, writable, site_of))


def copied(graph: Graph) -> Graph:
    """The same graph with new nodes; names and meta are kept."""
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _apply(model: nn.Module, made: EmitResult, inputs: Any, verify: bool) -> Sequence[judge.Check]:
    module = binding.load(made.text)
    if not verify or _is_meta(model):
        binding.apply(module, model)
        return ()
    run = _runner(model, inputs)
    original, wide = run(model), judge.float32_outputs(model, run)
    binding.apply(module, model)
    try:
        checks = judge.compare(original, run(model), wide, _dtype_of(model))
    except BaseException:
        binding.restore(model)
        raise
    failed = [check for check in checks if not check.passed]
    if failed:
        binding.restore(model)
        used = sorted({w.match.definition for w in made.written})
        raise VerifyError(f"{type(model).__name__} with {', '.join(used)}: {failed[0]}")
    return checks


def _runner(model: nn.Module, inputs: Any) -> judge.Call:
    if inputs is not None:
        args, kwargs = split_inputs(inputs)
        return lambda m: judge.run_module(m, *_as_judged(m, args, kwargs))
    sample = judge.sample_inputs(model, batch=_BATCH)
    return lambda m: judge.run_language_model(m, sample)


def _as_judged(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The float32 copy gets float32 inputs."""
    weights = [p for p in model.parameters() if p.is_floating_point()]
    if weights and all(p.dtype == torch.float32 for p in weights):
        return judge.to_float32(args), judge.to_float32(kwargs)
    return args, kwargs


def restore(model: Model) -> Model:
    """Put every module of the model back as it was before :func:`kernelize`; harmless on any other model."""
    _reports.pop(model, None)
    return binding.restore(model)


@contextmanager
def kernelized(model: Model, **options: Any) -> Iterator[Model]:
    """:func:`kernelize` for the length of a block."""
    try:
        yield kernelize(model, **options)
    finally:
        restore(model)


def report(model: nn.Module) -> Report:
    """What :func:`kernelize` did to this model.

    Raises:
        UsageError: If it did nothing to it.
    """
    found = _reports.get(model)
    if found is None:
        raise UsageError(f"this {type(model).__name__} has not been kernelized", advice="Call kernelize(model) first")
    return found


def _unchanged(model: Model, why: str, strict: bool, error: Exception) -> Model:
    if strict:
        raise error
    warnings.warn(f"tilegym_fx: {type(model).__name__} is unchanged: {why}", stacklevel=3)
    return model


def _why_nothing(found: Report) -> str:
    misses = found.misses()
    nearest = f"; the nearest miss is {misses[0]}" if misses else ""
    return f"nothing in it can be replaced{nearest}"


def _tell_about_cpu(model: nn.Module) -> None:
    global _told_about_cpu
    if not _told_about_cpu and not torch.cuda.is_available() and not _is_meta(model):
        _told_about_cpu = True
        warnings.warn("tilegym_fx: no CUDA device here, so its ops run their PyTorch references", stacklevel=3)


def _first_device(model: nn.Module) -> torch.device | None:
    return next((p.device for p in model.parameters()), None)


def _is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
