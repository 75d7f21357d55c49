"""Is a rewritten model right? It runs beside its original, and is taken back where an output or a call is not right.

The outputs are compared (`verify`). A model that chooses, as a mixture of experts does, gives others after any rounding
that turns a choice between near equals. So its wider run follows the choices of the original, and where the rewritten
one is still off, it is judged place by place (`places`), which no choice disturbs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from . import verify
from .choices import Choices, Instead, UnlikeError
from .errors import ExportError, TilegymFxError, VerifyError
from .export import MODEL_ERRORS, describe
from .ops import behind
from .places import Places, WrongError


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
        places: Why it was judged place by place, and what came of it; empty where the outputs were enough.
    """

    checks: Sequence[verify.Check] = ()
    no_wider: str = ""
    places: str = ""


UNCHECKED = Checked()
_NO_CHOICES = Choices()
_NOTHING = "nothing could be compared, as no call gives a tensor with elements, or leaves one in its inputs"


@dataclass(frozen=True)
class Rewriting:
    """A rewriting of a model that can be put on it and taken off.

    Attributes:
        model: The model.
        used: The Definitions in it.
        put: Puts it on.
        take: Takes it off.
        chooses: Whether the model chooses by scores.
        prepare: Done once it is on, before it runs.
    """

    model: nn.Module
    used: Collection[str]
    put: Callable[[], object]
    take: Callable[[], object]
    chooses: bool = False
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
        own = _original(rewriting, run, dtype)
    with _taken_back(rewriting):
        rewriting.put()
        if own.unlike:
            warnings.warn(f"tilegym_fx: {type(model).__name__}: {own.unlike[0]}", stacklevel=6)
            return Checked(own.unlike)
        rewriting.prepare()
        outputs = run(model, of=own.outputs)
        checks = verify.compare(own.outputs, outputs, own.wide.outputs, dtype)
        failed = [check for check in checks if not check.passed]
        if not any(output.numel() for given in own.outputs.values() for output in given):
            warnings.warn(f"tilegym_fx: {type(model).__name__}: {_NOTHING}", stacklevel=6)
        if not failed:
            return Checked(checks, own.wide.why_not)
        if own.choices is None:
            raise VerifyError(f"{rewriting}: {failed[0]}")
        return _judged_by_places(rewriting, run, own, own.choices, _Failed(outputs, failed[0]), dtype)


@dataclass(frozen=True)
class _Original:
    """What a model gives before it is rewritten.

    Attributes:
        outputs: In its own dtype.
        wide: In a wider one, with the same choices.
        choices: Its choices; None for a model that makes none.
        against: How far the wider run goes against its own scores in following them.
        unlike: Outputs in which two runs of it differ, so that nothing can be judged.
    """

    outputs: verify.Outputs
    wide: verify.Wider
    choices: Choices | None = None
    against: Choices | None = None
    unlike: Sequence[verify.Check] = ()


def _original(rewriting: Rewriting, run: Run, dtype: torch.dtype) -> _Original:
    model = rewriting.model
    choices, outputs = _first_run(model, run) if rewriting.chooses else (_NO_CHOICES, run(model))
    follows = choices is not None and any(choices.indices.values())

    def again(model: nn.Module) -> verify.Outputs:
        return run(model, of=outputs, around=_following(choices).call if choices and follows else nullcontext)

    if verify.apart(outputs, verify.with_other_numbers(model, again), dtype):
        # In a wider dtype other random numbers are drawn, so the original alone judges, if it is like itself.
        if unlike := verify.apart(outputs, again(model), dtype):
            return _Original(outputs, verify.Wider(None), unlike=unlike)
        return _Original(outputs, verify.Wider(None, "it draws random numbers"), choices if follows else None)
    if choices is None:
        return _Original(outputs, verify.Wider(None, "its choices cannot be watched, so that the run makes others"))
    if not follows:
        return _Original(outputs, wider_run(model, run))
    against = _following(choices)
    wide = wider_run(model, lambda copied: run(copied, of=outputs, around=against.call))
    return _Original(outputs, wide, choices, against)


def _first_run(model: nn.Module, run: Run) -> tuple[Choices | None, verify.Outputs]:
    """The model's outputs, and its choices; None where torch refuses, by some error, to have its code watched."""
    choices = Choices()
    try:
        outputs = run(model, around=choices.call)
    except MODEL_ERRORS as problem:
        if verify.is_out_of_memory(problem):
            raise
        return None, run(model)
    return choices, outputs


def _following(choices: Choices, instead: Instead = lambda op: None) -> Choices:
    return Choices(choices.indices, instead)


class _Failed(NamedTuple):
    """A run of the rewritten model whose outputs are off, and the first that is."""

    outputs: verify.Outputs
    off: verify.Check


def _judged_by_places(
    rewriting: Rewriting, run: Run, own: _Original, choices: Choices, failed_run: _Failed, dtype: torch.dtype
) -> Checked:
    """Each call of an op beside its reference; then the whole with the references in place of the kernels.

    What is found right in one run says nothing of another that gave other outputs.
    """
    places, off = Places(rewriting.model), failed_run.off
    try:
        looked_at = run(rewriting.model, of=own.outputs, around=places.call)
    except WrongError as problem:
        raise VerifyError(f"{rewriting}: {problem} ({off})") from None
    if unlike := [check for check in verify.compare(failed_run.outputs, looked_at, None, dtype) if not check.passed]:
        raise VerifyError(f"{rewriting}: two runs of the rewritten model differ: {unlike[0]}")
    follow = _following(choices, _reference_of)
    try:
        outputs = run(rewriting.model, of=own.outputs, around=follow.call)
    except verify.CallError as problem:
        if not isinstance(problem.problem, UnlikeError):
            raise
        follow = Choices(instead=_reference_of)  # it cannot follow, so that its own choices have to be the same
        outputs = run(rewriting.model, of=own.outputs, around=follow.call)
    checks = verify.compare(own.outputs, outputs, own.wide.outputs, dtype)
    try:
        failed = [check for check in (*checks, *_chosen(follow, own, dtype)) if not check.passed]
    except UnlikeError as problem:
        raise VerifyError(f"{rewriting}, with references in place of kernels: {problem} ({off})") from None
    if failed or not places.seen:
        raise VerifyError(f"{rewriting}, also with references in place of kernels: {(*failed, off)[0]}")
    return Checked(checks, own.wide.why_not, (
        f"{off}, and it chooses by scores; {sum(places.seen.values())} calls of {len(places.seen)} ops are right"
    ))  # fmt: skip


def _reference_of(overload: Any) -> Callable[..., Any] | None:
    op = behind(overload)
    return None if op is None else op.reference


def _chosen(follow: Choices, own: _Original, dtype: torch.dtype) -> Iterator[verify.Check]:
    """How far the scores of the rewritten model speak against the choices that it followed: no more than rounding.

    Raises:
        UnlikeError: It chose by itself, and more often than the original, so that there is nothing to hold that to.
    """
    wide = {} if own.wide.outputs is None or own.against is None else own.against.made
    for call, made in follow.made.items():
        if call in wide and len(made) > len(wide[call]):
            raise UnlikeError(f"{call} chooses {len(made)} times, {len(wide[call])} before")
        for n, choice in enumerate(made):
            theirs = wide[call][n].against if call in wide else None
            allowed = verify.allowed(choice.largest, theirs or 0.0, dtype)
            yield verify.Check(f"choice {n + 1} of {call}", choice.against, allowed, theirs)


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


def put_unjudged(rewriting: Rewriting) -> Checked:
    """Put a rewriting on its model without running it, all or nothing."""
    try:
        rewriting.put()
    except BaseException:
        rewriting.take()
        raise
    return UNCHECKED


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
    except (verify.CallError, *MODEL_ERRORS) as error:
        problem = error.problem if isinstance(error, verify.CallError) else error
        dtype = verify.wider_dtype(model)
        if verify.is_out_of_memory(problem):
            return verify.Wider(None, f"a run of it in {dtype} needs more memory than is free")
        if isinstance(problem, UnlikeError):
            return verify.Wider(None, f"in {dtype} it chooses in another way: {problem}")
        return verify.Wider(None, f"its code takes no {dtype}: {describe(problem)}")


def _dtype_of(model: nn.Module) -> torch.dtype:
    """What most elements of its parameters are in, of two with as many the finer one.

    None of a single byte is computed in, only stored.
    """
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize >= 2:
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=lambda dtype: (elements[dtype], -torch.finfo(dtype).eps), default=torch.float32)
