"""A rewritten model judged place by place: each call of an op beside its Definition's reference, on the same inputs.

Kernels that agree with their references wherever they are called, and a rewriting that computes what the original does
with the references in their place, are a right rewritten model. No output of the whole model is looked at for the
first, so a choice that a rounding turned, and all that comes of it, is no difference.

The reference is run in a wider dtype, float32 for 16 bits and float64 for float32, and a result may be off by what
`kernel_check` allows of that dtype, and by twice (float32: 8 times) as much as the reference in its own dtype is.
Integers are equal, unless they are choices (`choices`): those may be others where the reference's scores at them are as
good within the same tolerance, and what comes of them has to follow.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import ops
from .choices import Choices, UnlikeError
from .closeness import error_ratio, tolerance
from .ops.op import Op
from .verify import is_out_of_memory

#: What a reference may raise in a dtype that it was not written for.
_WIDTH_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError)
_HERE = "it"


class WrongError(Exception):
    """A call of an op is wrong; the message says how."""


class Places:
    """Looks at every call of our ops while a model runs.

    Attributes:
        seen: Definition -> its calls that were right.

    Args:
        model: The model, whose modules are named where a call is wrong.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: Counter[str] = Counter()
        self._paths = {id(module): path for path, module in model.named_modules()}

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Looks at the calls in a block.

        Raises:
            WrongError: At the first that is wrong.
        """
        with _Look(self, name):
            yield

    def look(self, op: Op, overload: Any, args: tuple[Any, ...], call: str) -> Any:
        """Makes one call of an op and judges it."""
        before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        returned = overload(*args)
        got = op.outputs(returned, args)
        try:
            _require_unwritten(op, before, args)
            require_right(op, before, got)
        except WrongError as problem:
            raise WrongError(f"{call}: {op.name}{self._where()}: {problem}") from None
        self.seen[op.name] += 1
        return returned

    def _where(self) -> str:
        """Which module calls, as the code on the stack tells."""
        frame: Any = sys._getframe()
        while frame is not None:
            path = self._paths.get(id(frame.f_locals.get("self")), "")
            if path:
                return f" at {path}"
            frame = frame.f_back
        return ""


class _Look(TorchDispatchMode):
    """Hands the calls of our ops on."""

    def __init__(self, places: Places, call: str) -> None:
        super().__init__()
        self._places = places
        self._call = call

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (op := ops.behind(overload)) is None:
            return overload(*args, **kwargs)
        rest = (kwargs[argument.name] for argument in overload._schema.arguments[len(args) :])
        return self._places.look(op, overload, (*args, *rest), self._call)


def _require_unwritten(op: Op, before: Sequence[Any], after: Sequence[Any]) -> None:
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        if isinstance(one, torch.Tensor) and place not in op.written and not _same(one, other):
            raise WrongError(f"it writes to its input {place}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())


def require_right(op: Op, args: tuple[Any, ...], got: tuple[torch.Tensor, ...]) -> None:
    """A call's outputs are those of the reference, within rounding."""
    own, made = _referred(op, args, None)
    if [(o.shape, o.dtype) for o in own] != [(g.shape, g.dtype) for g in got]:
        raise WrongError(f"it gives {_kinds(got)}, not {_kinds(own)}")
    picks = made.indices[_HERE]
    if others := [i for i, (o, g) in enumerate(zip(own, got, strict=True)) if _is_other(o, g)]:
        picks = _picks_of(op, args, own, got, others, picks)
        own, _ = _referred(op, args, picks)
    narrow = _narrowest(args)
    exact = _exact(op, args, picks, narrow) or own
    for i, (right, mine, value) in enumerate(zip(exact, own, got, strict=True)):
        _require_near(i, right, mine, value)


def _kinds(values: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{value.dtype} {list(value.shape)}" for value in values)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _narrowest(args: tuple[Any, ...]) -> torch.dtype:
    found = [dtype for a in args if (dtype := _dtype(a)) is not None]
    return min(found, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _is_other(own: torch.Tensor, got: torch.Tensor) -> bool:
    return not (own.is_floating_point() or own.is_complex()) and not torch.equal(own, got)


def _referred(
    op: Op, args: tuple[Any, ...], follows: Sequence[torch.Tensor] | None, dtype: torch.dtype | None = None
) -> tuple[tuple[torch.Tensor, ...], Choices]:
    """The reference's results, and its choices, which may be those of somebody else.

    Raises:
        WrongError: It cannot follow these.
    """
    choices = Choices(None if follows is None else {_HERE: follows}, of_integers=True, dtype=dtype)
    try:
        with choices.call(_HERE):
            return op.results(*args), choices
    except UnlikeError as problem:
        raise WrongError(str(problem)) from None


def _exact(
    op: Op, args: tuple[Any, ...], picks: Sequence[torch.Tensor], narrow: torch.dtype
) -> tuple[torch.Tensor, ...] | None:
    """The reference's results in a wider dtype, where it can be run so."""
    try:
        results, made = _referred(op, _wide(args, narrow), picks, narrow)
    except _WIDTH_ERRORS as problem:
        if is_out_of_memory(problem):
            raise
        return None
    if any(not choice.excess <= 1 for choice in made.made[_HERE]):
        raise WrongError("it chooses others than its reference, whose scores are no ties")
    return results


def _wide(args: tuple[Any, ...], narrow: torch.dtype) -> tuple[Any, ...]:
    wide = torch.float32 if narrow.itemsize < 4 else torch.float64
    return tuple(a.to(wide) if _dtype(a) is not None else a for a in args)


def _picks_of(
    op: Op, args: tuple[Any, ...], own: Sequence[torch.Tensor], got: Sequence[torch.Tensor], others: Sequence[int],
    picks: Sequence[torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """The choices with which the reference gives a call's integers."""
    known = [next((n for n in reversed(range(len(picks))) if _is_pick(picks[n], own[i])), None) for i in others]
    if None in known:
        raise WrongError(f"output {others[known.index(None)]} is another one")
    found = list(picks)
    if len(picks) > len(others):  # others come before, as of groups of experts, and may tie too
        found = _referred(op, _favouring(args, [got[i] for i in others]), None)[1].indices[_HERE]
    for n, i in zip(known, others, strict=True):
        assert n is not None
        found[n] = got[i]
    return found


def _is_pick(pick: torch.Tensor, output: torch.Tensor) -> bool:
    return pick.shape == output.shape and torch.equal(pick, output.to(pick.dtype))


def _favouring(args: tuple[Any, ...], chosen: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Wide arguments in which what was chosen has scores that are better by as much as they may be off."""

    def nudged(value: Any) -> Any:
        dtype = _dtype(value)
        for index in chosen:
            if dtype is None or value.shape[:-1] != index.shape[:-1] or value.dim() != index.dim():
                continue
            inside = index.long().clamp(0, value.shape[-1] - 1)  # what is outside is found when it is followed
            more = tolerance(value.double(), dtype).gather(-1, inside)
            value = value.double().scatter_add(-1, inside, more)
        return value

    return _wide(tuple(map(nudged, args)), _narrowest(args))


def _require_near(i: int, right: torch.Tensor, mine: torch.Tensor, value: torch.Tensor) -> None:
    """One output is near the reference's."""
    if value.is_complex():
        right, mine, value = (torch.view_as_real(t) for t in (right, mine, value))
    if not value.is_floating_point():
        if not torch.equal(right, value):
            raise WrongError(f"output {i} is another one")
        return
    own = (mine.double() - right.double()).nan_to_num(0, 0, 0).abs()
    own = own.amax(-1, keepdim=True) if own.dim() and own.numel() else own
    if not (ratio := error_ratio(right, value, own, value.dtype)) <= 1:
        raise WrongError(f"output {i} is off by {ratio:.3g} times what rounding explains")
