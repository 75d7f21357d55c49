"""The model under experiment: one of transformers by name, or what a function of a file returns."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from tilegym_fx.bench.models import cut_layers
from tilegym_fx.errors import ExportError, UnknownModelError
from tilegym_fx.export import ExportedGraph, build, export_module, export_phase, phase_inputs, positions
from tilegym_fx.model_source import resolve_model
from tilegym_fx.provenance import Provenance, record
from tilegym_fx.results import Phase

#: Sizes of the calls: primes, so that none is a size of the model and a draft shows which are the call's.
BATCH = 3
#: The first of these lengths that a model has positions for.
SEQS = (1031, 509, 127)


@dataclass(frozen=True)
class Call:
    """One captured call of the model.

    Attributes:
        name: ``prefill``, ``decode`` or ``call``.
        graph: Its graph, as it was captured.
        inputs: Positional inputs, where the call can be run on this machine.
        tokens: What throughput counts: tokens of a language model, calls of any other module.
        provenance: Where its nodes come from, if that was recorded.
    """

    name: str
    graph: ExportedGraph
    inputs: tuple[Any, ...] | None
    tokens: int
    provenance: Provenance | None = None

    def copy(self) -> Graph:
        """Its graph with new nodes, for a pass that changes it; names and meta are kept."""
        return self.graph.copy()


@dataclass(frozen=True)
class Subject:
    """A model and its captured calls.

    Attributes:
        name: As the user gave it.
        model_type: For tags.
        module: The model; its weights may be on ``meta``.
        calls: What was captured.
        is_public: Whether its source lines have permanent links.
        batch: Sequences of the calls.
        seq: Tokens of the calls.
        positions: How many positions the model has, if it has a table of them.
        dtype: What a language model's weights are in, by name.
    """

    name: str
    model_type: str
    module: nn.Module
    calls: tuple[Call, ...]
    is_public: bool
    batch: int
    seq: int
    positions: int | None = None
    dtype: str = ""


def is_file(model: str) -> bool:
    """Whether a model is given as ``FILE.py::function``."""
    return ".py::" in model


def capture(
    model: str,
    phases: Sequence[Phase] = ("prefill", "decode"),
    *,
    layers: int | None = None,
    dtype: str | None = None,
    with_provenance: bool = False,
) -> Subject:
    """Build a model and capture its calls.

    Args:
        model: A name that ``scan`` takes, or ``FILE.py::function``; the function returns a module and the
            tuple of its positional inputs.
        phases: Calls of a language model.
        layers: The first layers of a language model only.
        dtype: Of a language model's weights, by name; None for its checkpoint's.
        with_provenance: Record where each node comes from, to know what can be written into the source.

    Raises:
        UnknownModelError: There is no such model.
        UsageError: ``layers`` is more than the model has.
        ExportError: None of its calls can be captured.
    """
    if is_file(model):
        module, inputs = _from_file(model)
        graph = export_module(module, inputs)
        batch, seq = _sizes_of(inputs)
        name = type(module).__name__.lower()
        return Subject(model, name, module, (Call("call", graph, inputs, 1),), False, batch, seq)
    source = resolve_model(model)
    if layers is not None:
        cut_layers(source.config, layers)
    taken = source.dtype_for(dtype)
    module = build(source.config, taken)
    limit = positions(module)
    seq = next((n for n in SEQS if limit is None or n < limit), SEQS[-1])
    calls = tuple(_calls(module, phases, seq, with_provenance))
    name = str(taken).removeprefix("torch.")
    return Subject(model, source.model_type, module, calls, True, BATCH, seq, limit, name)


def _calls(module: nn.Module, phases: Sequence[Phase], seq: int, with_provenance: bool) -> Iterator[Call]:
    problems: list[str] = []
    for phase in phases:
        try:
            yield _call(module, phase, seq, with_provenance)
        except ExportError as error:
            problems.append(error.what)
    if len(problems) == len(phases):
        raise ExportError(problems[0])


def _call(module: nn.Module, phase: Phase, seq: int, with_provenance: bool) -> Call:
    tokens = BATCH * (seq if phase == "prefill" else 1)
    if not with_provenance:
        return Call(phase, export_phase(module, phase, BATCH, seq), None, tokens)
    graph, provenance = record(module, (), phase_inputs(module, phase, BATCH, seq))
    return Call(phase, graph, None, tokens, provenance)


def _from_file(model: str) -> tuple[nn.Module, tuple[Any, ...]]:
    path, _, function = model.partition("::")
    file = Path(path).resolve()
    if not file.is_file():
        raise UnknownModelError(f"{path} does not exist", advice="Give FILE.py::function")
    spec = importlib.util.spec_from_file_location(f"tilegym_fx_subject_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, function, None)
    if not callable(make):
        raise UnknownModelError(f"{path} has no function {function!r}", advice="It returns a module and its inputs")
    made, inputs = make()
    return made.eval(), tuple(inputs)


def _sizes_of(inputs: Sequence[Any]) -> tuple[int, int]:
    """The first two sizes of the first tensor stand for batch and length."""
    shape = next((tuple(v.shape) for v in inputs if isinstance(v, torch.Tensor)), ())
    return (shape[0] if shape else 0), (shape[1] if len(shape) > 2 else 0)
