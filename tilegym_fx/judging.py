"""Is a rewritten model right? It runs beside its original, and is taken back where an output or a call is not right.

The outputs are compared (`verify`). A model that chooses, as a mixture of experts does, gives others after any rounding
that turns a choice between near equals. So its wider run follows the choices of the original, and where the rewritten
one is still off, it is judged place by place (`places`), which no choice disturbs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from . import verify
from .errors import ExportError, TilegymFxError, VerifyError
from .export import MODEL_ERRORS, describe


class Run(Protocol):
    """Runs a model through the calls that are compared; see `verify.run_language_model` for the arguments."""

    def __call__(
        self, model: nn.Module, /, *, of: Collection[str] | None = None, around: verify.Around = ...
    ) -> verify.Outputs: ...


@dataclass(frozen=True)
class Checked:
    """What was found of a rewritten model.

    Attributes:
        checks: The outputs compared.
        no_wider: Why no run in a wider dtype judged them.
    """

    checks: Sequence[verify.Check] = ()
    no_wider: str = ""


UNCHECKED = Checked()


@dataclass(frozen=True)
class Rewriting:
    """A rewriting of a model that can be put on it and taken off.

    Attributes:
        model: The model.
        used: The Definitions in it.
        put: Puts it on.
        take: Takes it off.
        prepare: Done once it is on, before it runs.
    """

    model: nn.Module
    used: Collection[str]
    put: Callable[[], object]
    take: Callable[[], object]
    prepare: Callable[[], object] = lambda: None

    def __str__(self) -> str:
        return f"{type(self.model).__name__} with {', '.join(sorted(self.used))}"


def judged(rewriting: Rewriting, run: Run) -> Checked:
    """Put a rewriting on its model, where it stays if it is right.

    Raises:
        ExportError: If the model's own code fails where it is run and not captured.
        VerifyError: If it is wrong, or does not run; the model is as it was.
    """
    model = rewriting.model
    dtype = _dtype_of(model)
    with _own_code(model):
        own = _original(model, run, dtype)
    rewriting.put()
    if own.unlike:
        warnings.warn(f"tilegym_fx: {type(model).__name__}: {own.unlike[0]}", stacklevel=5)
        return Checked(own.unlike)
    with _taken_back(rewriting):
        rewriting.prepare()
        checks = verify.compare(own.outputs, run(model, of=own.outputs), own.wide.outputs, dtype)
        if failed := [check for check in checks if not check.passed]:
            raise VerifyError(f"{rewriting}: {failed[0]}")
    return Checked(checks, own.wide.why_not)


@dataclass(frozen=True)
class _Original:
    """What a model gives before it is rewritten.

    Attributes:
        outputs: In its own dtype.
        wide: In a wider one.
        unlike: Outputs in which two runs of it differ, so that nothing can be judged.
    """

    outputs: verify.Outputs
    wide: verify.Wider
    unlike: Sequence[verify.Check] = ()


def _original(model: nn.Module, run: Run, dtype: torch.dtype) -> _Original:
    outputs = run(model)

    def again(model: nn.Module) -> verify.Outputs:
        return run(model, of=outputs)

    if verify.apart(outputs, verify.with_other_numbers(model, again), dtype):
        # In a wider dtype other random numbers are drawn, so the original alone judges, if it is like itself.
        if unlike := verify.apart(outputs, again(model), dtype):
            return _Original(outputs, verify.Wider(None), unlike)
        return _Original(outputs, verify.Wider(None, "it draws random numbers"))
    return _Original(outputs, wider_run(model, run))


@contextmanager
def _own_code(model: nn.Module) -> Iterator[None]:
    """Says of what fails that it is the model's own, before anything has been done to it."""
    name = type(model).__name__
    try:
        yield
    except verify.CallError as problem:
        raise ExportError(f"{name} runs once, and not again: {problem}", advice=_LOOK) from problem.problem
    except MODEL_ERRORS as problem:
        if isinstance(problem, TilegymFxError) or verify.is_out_of_memory(problem):
            raise
        raise ExportError(
            f"{name} can be captured, but does not run by itself: {describe(problem)}", advice=_LOOK
        ) from problem


_LOOK = "Call it with the same inputs to see where, or pass verify=False to have nothing run"


@contextmanager
def _taken_back(rewriting: Rewriting) -> Iterator[None]:
    """Takes a rewriting off its model where it fails, and says where and of what."""
    try:
        yield
    except BaseException as problem:
        rewriting.take()
        _raise_as_ours(rewriting, problem)
        raise


def _raise_as_ours(rewriting: Rewriting, problem: BaseException) -> None:
    """Raises what a user is told of a failure, if it is one of the model's code or of a kernel; no interrupt is."""
    in_call = isinstance(problem, verify.CallError)
    cause = problem.problem if isinstance(problem, verify.CallError) else problem
    where = f" in {problem.call}, which the original runs" if isinstance(problem, verify.CallError) else ""
    if isinstance(cause, TilegymFxError):
        raise cause
    if verify.is_out_of_memory(cause):
        raise verify.MemoryVerifyError(f"{rewriting} runs out of memory{where}: {describe(cause)}") from cause
    if in_call or isinstance(cause, MODEL_ERRORS):
        raise VerifyError(f"{rewriting} does not run{where}: {describe(cause)}") from cause


def wider_run(model: nn.Module, run: verify.Call) -> verify.Wider:
    """A run of the model in a wider dtype; none for code that takes no other dtype than its own."""
    try:
        return verify.wider_outputs(model, run)
    except MODEL_ERRORS as problem:
        if verify.is_out_of_memory(problem):
            return verify.Wider(None, f"a run of it in {verify.wider_dtype(model)} needs more memory than is free")
        return verify.Wider(None, f"its code takes no {verify.wider_dtype(model)}: {describe(problem)}")


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
