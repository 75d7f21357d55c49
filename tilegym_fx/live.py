"""``kernelize(model)``: this live model, in place, undoable.

plan -> emit -> import the emitted text -> bind it to this instance -> verify. What is tested is what is emitted, and
what runs: there is no other path.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils._pytree import tree_map_only

from . import apply as binding
from . import verify as judge
from .alone import alone
from .cost import Device, device_of
from .emit import Alike, EmitResult, Emitter, why_not
from .errors import ExportError, MatchError, TilegymFxError, UsageError, VerifyError
from .export import MODEL_ERRORS, cache_of, caches, phase_inputs, site_of
from .export.phases import without_memory
from .export.trace import describe
from .folder_form import emitted_path, make_emitted_folder
from .inventory import Inventory, load
from .live_report import Report
from .ops import lower_as_calls, tell_of_references, usual_device, what_runs
from .pipeline import Outcome, find
from .plan import Policy
from .provenance import Provenance, record
from .results import Phase

Model = TypeVar("Model", bound=nn.Module)
Call = tuple[tuple[Any, ...], dict[str, Any]]

_BATCH, _SEQ = 2, 256
_PHASES: tuple[Phase, ...] = ("prefill", "decode")
#: Layers of a model that are captured where its own code alone is of interest.
_KEPT_OF_A_LIST = 2
_OLD_PYTHON = (
    "Python before 3.11 does not tell which expression an instruction belongs to, so no source can be rewritten; "
    'torch.compile(model, backend="tilegym_fx") uses the same kernels'
)
_reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()


def kernelize(model: Model, *, inputs: Any = None, only: Collection[str] | None = None,
              skip: Collection[str] | None = None, strict: bool = False, verify: bool = True,
              compile: bool | Mapping[str, Any] | None = None, emit: str | Path | None = None) -> Model:  # fmt: skip
    """Put kernels where this model's own code computes what they compute.

    Only this instance changes: its modules become instances of emitted subclasses of their classes. Nothing of
    transformers is touched, state dicts keep their keys, and :func:`restore` puts everything back. A second call
    starts from the model as it is by then: adapters, hooks and other dtypes are taken into account.

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
        ExportError: With ``strict``, if the model cannot be captured, or does not run.
        MatchError: If an option names no Definition; with ``strict``, if nothing matches.
        UsageError: If ``model`` is no module or another thread is running it, or if ``emit`` or ``compile`` is nothing
            that can be used.
        VerifyError: If an output differs by more than rounding, or the result does not run; the model is put back.
    """
    _require_module(model)
    compile_options = _compile_options(compile) if compile else None
    tell_of_references(_device(model))
    if sys.version_info < (3, 11):
        return _unchanged(model, _OLD_PYTHON, strict, MatchError(_OLD_PYTHON))
    with alone(model):
        restore(model)
        inner = own_model(model)
        try:
            made, report = plan_source_form(inner, inputs=inputs, only=only, skip=skip or ())
            if made.text and emit is not None:
                _save(made.text, emit, inner)
            checked = _apply(inner, made, inputs, verify) if made.text else _UNCHECKED
        except ExportError as error:
            return _unchanged(model, str(error), strict, error)
    if not made.text:
        return _unchanged(model, _why_nothing(report), strict, MatchError(_why_nothing(report)))
    _reports[model] = _reports[inner] = report.with_checks(checked.checks, checked.no_wider)
    lower_as_calls()  # whoever compiles the model later, and however
    if compile_options is not None:
        model.compile(**compile_options)
    return model


def _compile_options(compile: Any) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` that it takes: tried on another module before anything is done.

    Raises:
        UsageError: If it does not.
    """
    try:
        options = {} if compile is True else dict(compile)
        torch.compile(nn.Identity(), **options)
    except MODEL_ERRORS as problem:
        raise UsageError(f"compile={compile!r} is nothing that torch.compile takes: {describe(problem)}",
                         advice="Give True, or a dict of keyword arguments of torch.compile") from problem  # fmt: skip
    return options


def _save(text: str, emit: str | Path, model: nn.Module) -> None:
    try:
        make_emitted_folder(emit)
        binding.save(text, emitted_path(emit, model))
    except (OSError, TypeError) as problem:
        raise UsageError(f"emit={emit!r} cannot be written: {problem}",
                         advice="Give a folder, or a file in one that is there") from problem  # fmt: skip


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"{what} is no module with Python code", advice="Give an instance of an nn.Module")


def plan_source_form(model: nn.Module, *, inputs: Any = None, only: Collection[str] | None = None,
                     skip: Collection[str] = (), inventory: Inventory | None = None,
                     device: Device | None = None) -> tuple[EmitResult, Report]:  # fmt: skip
    """Capture, match and write: the emitted text and the report of what is in it, with nothing applied.

    Raises:
        ExportError: If the model cannot be captured in any phase.
        MatchError: If an option names no Definition.
    """
    started = time.perf_counter()
    _require_weights(model)
    policy = Policy(device or device_of(_device(model)), only, skip)
    planner = Planner(model, inventory or load(), policy)
    planner.capture_calls(inputs)
    made = planner.emitter.result()
    problems = {name: str(error) for name, error in planner.failures.items()}
    return made, Report.of(model, made, planner.outcomes, problems, time.perf_counter() - started)


def _require_weights(model: nn.Module) -> None:
    """Weights that accelerate brings in for each call are not there when a method reads them by itself."""
    for path, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,))):
            where = f"{path or '<root>'} ({type(module).__name__})"
            raise ExportError(
                f"{where} has hooks that bring in its weights for each call",
                advice="Load the model with all its weights in memory",
            )


@dataclass
class Planner:
    """Captures the calls of a model one after the other, and plans each in source form.

    Attributes:
        model: The model.
        inventory: Whose Definitions to look for.
        policy: Device, ``only`` and ``skip``.
        outcomes: Call (``prefill``, ``decode``, or ``call`` with the user's inputs) -> what was found in it.
        failures: Call -> why it could not be captured.
    """

    model: nn.Module
    inventory: Inventory
    policy: Policy
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failures: dict[str, ExportError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.emitter = Emitter(self.model)

    def capture_calls(self, inputs: Any) -> None:
        """The user's own call, or those that ``generate()`` makes.

        Raises:
            ExportError: If none can be captured.
        """
        for name, (args, kwargs) in self._calls(inputs):
            if (found := self._capture(self.model, name, args, kwargs)) is not None:
                self.outcomes[name] = found[0]
                self.emitter.add(found[0].chosen, found[1])
        if not self.outcomes:
            raise ExportError.because(f"{type(self.model).__name__} cannot be captured", *self.failures.values())
        if inputs is None:
            self._capture_padded()

    def _calls(self, inputs: Any) -> Iterator[tuple[str, Call]]:
        if inputs is not None:
            yield "call", split_inputs(inputs)
            return
        if not is_language_model(self.model):
            raise UsageError(f"{type(self.model).__name__} is no causal language model of transformers",
                             advice="Pass inputs=, a sample of what it is called with")  # fmt: skip
        for phase in _PHASES:
            try:
                yield phase, ((), phase_inputs(self.model, phase, _BATCH, _sample_length(self.model)))
            except ExportError as error:
                self.failures[phase] = error

    def _capture(
        self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Outcome, Provenance] | None:
        try:
            exported, provenance = record(module, args, kwargs)
        except ExportError as error:
            self.failures[name] = error
            return None
        policy = Policy(self.policy.device, self.policy.only, self.policy.skip, lambda m: why_not(m, provenance))
        # The record speaks of the exported graph, so the pass works on a copy.
        return find(copied(exported.graph_module.graph), self.inventory, policy, site_of), provenance

    def _capture_padded(self) -> None:
        """What a batch with padding does where the code above chose by condition: one module of each kind alone."""
        groups = self.emitter.conditional()
        for phase in _PHASES if groups else ():
            name = f"padded {phase}"
            try:
                kwargs = phase_inputs(self.model, phase, _BATCH, _sample_length(self.model), padded=True)
                calls = _calls_inside(self.model, kwargs, groups)
            except ExportError as error:
                self.failures[name] = error
                continue
            for group in groups:
                call = calls.get(group.module)
                if call is None:
                    continue
                with _first_of_each_list(group.module) as is_shorter:
                    found = self._capture(group.module, name, *call)
                if found is None and is_shorter:  # its code may count its layers
                    self.failures.pop(name)
                    found = self._capture(group.module, name, *call)
                if found is not None:
                    self.emitter.add_alike(group, found[0].chosen, found[1])


@contextmanager
def _first_of_each_list(module: nn.Module) -> Iterator[bool]:
    """Lists of modules of one class hold only their first ones meanwhile: what a module's own code does before and
    after its layers takes as long to capture as they do. Gives whether any list is shorter."""
    saved = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.ModuleList and len(child) > _KEPT_OF_A_LIST and len({type(m) for m in child}) == 1
    ]
    try:
        for parent, name, child in saved:
            setattr(parent, name, child[:_KEPT_OF_A_LIST])
        yield bool(saved)
    finally:
        for parent, name, child in saved:
            setattr(parent, name, child)


def _calls_inside(model: nn.Module, kwargs: dict[str, Any], groups: Sequence[Alike]) -> dict[nn.Module, Call]:
    """What one module of each group is called with in a call of the model. Nothing is computed.

    Raises:
        ExportError: If the model does not run so.
    """
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
        if len(calls) == len(groups):
            raise _SeenAll

    caches.register(model)
    handles = [group.module.register_forward_pre_hook(note, with_kwargs=True) for group in groups]
    fake = detect_fake_mode(kwargs) or FakeTensorMode(allow_non_fake_inputs=True)
    mode = nullcontext() if _is_meta(model) else fake
    try:
        with without_memory(model, mode), caches.masks_as_when_run(kwargs):
            model(**kwargs)
    except _SeenAll:
        pass
    except MODEL_ERRORS as error:
        raise ExportError(f"{type(model).__name__} cannot be run with padding: {describe(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _SeenAll(Exception):
    """Ends a run in which every module has been called that was waited for."""


def split_inputs(inputs: Any) -> Call:
    """``inputs=`` as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, list | tuple) else ((inputs,), {})


def own_model(model: nn.Module) -> nn.Module:
    """The model of transformers inside one of peft, where the calls of ``generate()`` arrive; else the model."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def is_language_model(model: nn.Module) -> bool:
    """Whether the module is a transformers model that gives logits for token ids."""
    speaks: Any = model
    return hasattr(model, "config") and hasattr(model, "generate") and speaks.get_output_embeddings() is not None


def _sample_length(model: nn.Module) -> int:
    config = model.config
    limits = [getattr(config, name, None) for name in ("n_positions", "max_position_embeddings")]
    return max(8, min([_SEQ, *(limit // 2 for limit in limits if isinstance(limit, int) and limit > 0)]))


def copied(graph: Graph) -> Graph:
    """The same graph with new nodes; names and meta are kept."""
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


@dataclass(frozen=True)
class _Checked:
    """The checks of a rewritten model, and why no run in a wider dtype judged them."""

    checks: Sequence[judge.Check] = ()
    no_wider: str = ""


_UNCHECKED = _Checked()


def _apply(model: nn.Module, made: EmitResult, inputs: Any, verify: bool) -> _Checked:
    module = binding.load(made.text)
    if not verify or _is_meta(model):
        binding.apply(module, model)
        return _UNCHECKED
    run = _runner(model, inputs)
    original, dtype = _runs(model, run), _dtype_of(model)
    wide = judge.Wider(None)
    if judge.apart(original, judge.with_other_numbers(model, run), dtype):
        # In a wider dtype other random numbers are drawn, so the original alone judges, if it is like itself.
        if unlike := judge.apart(original, run(model), dtype):
            binding.apply(module, model)
            warnings.warn(f"tilegym_fx: {type(model).__name__}: {unlike[0]}", stacklevel=3)
            return _Checked(unlike)
        wide = judge.Wider(None, "it draws random numbers")
    else:
        wide = _wider_run(model, run)
    binding.apply(module, model)
    used = ", ".join(sorted({w.match.definition for w in made.written}))
    try:
        checks = judge.compare(original, run(model), wide.outputs, dtype)
    except BaseException as problem:
        binding.restore(model)
        if isinstance(problem, MODEL_ERRORS) and not isinstance(problem, torch.OutOfMemoryError | TilegymFxError):
            raise VerifyError(f"{type(model).__name__} with {used} does not run: {describe(problem)}") from problem
        raise
    failed = [check for check in checks if not check.passed]
    if failed:
        binding.restore(model)
        raise VerifyError(f"{type(model).__name__} with {used}: {failed[0]}")
    return _Checked(checks, wide.why_not)


def _runs(model: nn.Module, run: judge.Call) -> judge.Outputs:
    """What the model itself gives.

    Raises:
        ExportError: If its own code fails where it is run and not captured.
    """
    try:
        outputs: judge.Outputs = run(model)
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as problem:
        raise ExportError(
            f"{type(model).__name__} can be captured, but does not run by itself: {describe(problem)}",
            advice="Call it with the same inputs to see where, or pass verify=False to have nothing run",
        ) from problem
    return outputs


def _runner(model: nn.Module, inputs: Any) -> judge.Call:
    if inputs is not None:
        args, kwargs = split_inputs(inputs)
        return lambda m: judge.run_module(m, *_as_judged(m, args, kwargs))
    sample = judge.sample_inputs(model, batch=_BATCH)
    return lambda m: judge.run_language_model(m, sample, _cache_of)


def _cache_of(model: nn.Module, results: Any) -> dict[str, Any] | None:
    try:
        name, cache = cache_of(model, results)
    except ExportError:
        return None
    return {name: cache}


def wider_outputs(model: nn.Module, run: judge.Call) -> judge.Outputs | None:
    """A run of the model in a wider dtype; None for code that takes no other dtype than its own."""
    return _wider_run(model, run).outputs


def _wider_run(model: nn.Module, run: judge.Call) -> judge.Wider:
    try:
        return judge.wider_outputs(model, run)
    except MODEL_ERRORS as problem:
        return judge.Wider(None, f"its code takes no {judge.wider_dtype(model)}: {describe(problem)}")


def _as_judged(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A copy in a wider dtype gets its inputs in that dtype."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    wide = next(iter(dtypes)) if len(dtypes) == 1 else None
    if wide in (torch.float32, torch.float64):
        return judge.in_dtype(args, wide), judge.in_dtype(kwargs, wide)
    return args, kwargs


def restore(model: Model) -> Model:
    """Put every module of the model back as it was before :func:`kernelize`; harmless on any other model.

    Raises:
        UsageError: If it is no module.
    """
    _require_module(model)
    for known in (model, own_model(model)):
        if known in _reports:
            del _reports[known]
    return binding.restore(model)


@contextmanager
def kernelized(model: Model, **options: Any) -> Iterator[Model]:
    """:func:`kernelize` for the length of a block."""
    try:
        yield kernelize(model, **options)
    finally:
        restore(model)


def report(model: nn.Module) -> Report:
    """What :func:`kernelize` did to this model, and what has been taken back since.

    Raises:
        UsageError: If it did nothing to it.
    """
    _require_module(model)
    found = _reports.get(model)
    if found is None:
        raise UsageError(f"this {type(model).__name__} has not been kernelized", advice="Call kernelize(model) first")
    binding.check(model)
    return replace(found, given_back=tuple(binding.given_back(model)), runs=what_runs(_device(model)))


def _unchanged(model: Model, why: str, strict: bool, error: Exception) -> Model:
    if strict:
        raise error
    warnings.warn(f"tilegym_fx: {type(model).__name__} is unchanged: {why}", stacklevel=3)
    return model


def _why_nothing(found: Report) -> str:
    misses = found.misses()
    nearest = f"; the nearest miss is {misses[0]}" if misses else ""
    return f"nothing in it can be replaced{nearest}"


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), usual_device())


def _is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
