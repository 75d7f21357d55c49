"""The model under experiment: one of transformers by name, or what a function of a file returns."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilegym_fx.errors import ExportError, UnknownModelError
from tilegym_fx.export import ExportedGraph, build, export_module, export_phase
from tilegym_fx.model_source import resolve_model
from tilegym_fx.results import Phase

#: Sizes of the calls: primes, so that none is a size of the model and a draft shows which are the call's.
BATCH, SEQ = 3, 1031


@dataclass(frozen=True)
class Call:
    """One captured call of the model.

    Attributes:
        name: ``prefill``, ``decode`` or ``call``.
        graph: Its graph; brought to the normal form when it is matched.
        inputs: Positional inputs, where the call can be run on this machine.
        tokens: What throughput counts: tokens of a language model, calls of any other module.
    """

    name: str
    graph: ExportedGraph
    inputs: tuple[Any, ...] | None
    tokens: int


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
    """

    name: str
    model_type: str
    module: nn.Module
    calls: tuple[Call, ...]
    is_public: bool
    batch: int
    seq: int


def is_file(model: str) -> bool:
    """Whether a model is given as ``FILE.py::function``."""
    return ".py::" in model


def capture(model: str, phases: Sequence[Phase] = ("prefill", "decode")) -> Subject:
    """Build a model and capture its calls.

    Args:
        model: A name that ``scan`` takes, or ``FILE.py::function``; the function returns a module and the
            tuple of its positional inputs.
        phases: Calls of a language model.

    Raises:
        UnknownModelError: There is no such model.
        ExportError: None of its calls can be captured.
    """
    if is_file(model):
        module, inputs = _from_file(model)
        graph = export_module(module, inputs)
        batch, seq = _sizes_of(inputs)
        name = type(module).__name__.lower()
        return Subject(model, name, module, (Call("call", graph, inputs, 1),), False, batch, seq)
    source = resolve_model(model)
    module = build(source.config, torch.bfloat16)
    calls = tuple(_calls(module, phases))
    return Subject(model, source.model_type, module, calls, True, BATCH, SEQ)


def _calls(module: nn.Module, phases: Sequence[Phase]) -> Iterator[Call]:
    problems: list[str] = []
    for phase in phases:
        tokens = BATCH * (SEQ if phase == "prefill" else 1)
        call = _call(module, phase, tokens, problems)
        if call is not None:
            yield call
    if len(problems) == len(phases):
        raise ExportError(problems[0])


def _call(module: nn.Module, phase: Phase, tokens: int, problems: list[str]) -> Call | None:
    try:
        return Call(phase, export_phase(module, phase, BATCH, SEQ), None, tokens)
    except ExportError as error:
        problems.append(error.what)
        return None


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
