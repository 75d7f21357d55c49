"""Choices of torch's own operations: which of some scores are the largest.

A mixture of experts takes the best few of its scores. Where two are nearly equal any rounding turns the choice, and the
outputs jump by more than rounding, although nothing is wrong. So choices are recorded while code runs, and other code
that computes the same in another way is made to follow them: then both are continuous, and can be compared. How far the
one that follows would have had to go against its own scores is kept, and is to be no more than rounding.

Only what is chosen by value is known here: ``topk``, ``sort``, ``argsort``, ``argmax`` and ``argmin``. A threshold
(``scores > 0.5``), and ``max`` over a dimension, of which nearly everybody wants the value, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from .closeness import tolerance

_aten = torch.ops.aten
#: What gives values and their places, and what gives places alone.
_WITH_VALUES = frozenset({_aten.topk, _aten.sort})
_PLACES = frozenset({_aten.argmax, _aten.argmin, _aten.argsort})
#: Overloads that give new tensors.
_GIVING = frozenset({"default", "stable"})

#: What is to run in place of an operation; None for itself.
Instead = Callable[[Any], Callable[..., Any] | None]


def chooses(graph: Graph) -> bool:
    """Whether a captured graph chooses by floating-point scores."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _WITH_VALUES | _PLACES:
            scores = node.args[0].meta.get("val")
            if isinstance(scores, torch.Tensor) and scores.is_floating_point():
                return True
    return False


class UnlikeError(ValueError):
    """What follows chooses another number of times, or among others, than what it is to follow."""


@dataclass(frozen=True)
class Choice:
    """One choice.

    Attributes:
        index: The places that were chosen.
        against: By how much the values at these places are beside the best ones at most; 0 for one's own choice.
        largest: The largest of the best values.
        excess: The same as `against` in units of what rounding explains at each value; 1 and less is a tie.
    """

    index: torch.Tensor
    against: float = 0.0
    largest: float = 0.0
    excess: float = 0.0


@dataclass
class Choices:
    """The choices of some code, by the call that it runs.

    Attributes:
        follows: Choices to make instead of its own; None to let it choose.
        instead: What runs in place of an operation.
        of_integers: Whether the order of integers is a choice too.
        dtype: Whose roundings explain ties; by default that of the scores.
        made: Call -> its choices, in order.
    """

    follows: Mapping[str, Sequence[torch.Tensor]] | None = None
    instead: Instead = field(default=lambda op: None)
    of_integers: bool = False
    dtype: torch.dtype | None = None
    made: dict[str, list[Choice]] = field(default_factory=dict)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Watches the code that runs in a block; what fails has made no choices.

        Raises:
            UnlikeError: It cannot follow.
        """
        followed = None if self.follows is None else self.follows.get(name, ())
        mode = _Watch(self, followed)
        with mode:
            yield
        if followed is not None and len(followed) != len(mode.made):
            raise UnlikeError(f"{name} chooses {len(mode.made)} times, {len(followed)} before")
        self.made[name] = mode.made

    @property
    def indices(self) -> dict[str, list[torch.Tensor]]:
        """What others can follow."""
        return {name: [choice.index for choice in made] for name, made in self.made.items()}


class _Watch(TorchDispatchMode):
    """Sees every operation of a call."""

    def __init__(self, choices: Choices, followed: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._choices = choices
        self._followed = followed
        self.made: list[Choice] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (other := self._choices.instead(op)) is not None:
            with self:
                return other(*args, **kwargs)
        result = op(*args, **kwargs)
        packet = getattr(op, "overloadpacket", None)
        if packet not in _WITH_VALUES | _PLACES or op._overloadname not in _GIVING:
            return result
        if not (args[0].is_floating_point() or self._choices.of_integers):
            return result
        own = result[1] if packet in _WITH_VALUES else result
        dim = _dim_of(op, args, kwargs)
        if self._followed is None:
            self.made.append(Choice(own))
            return result
        index = self._like_before(own, args[0], dim)
        best, values = _at(args[0], own, dim), _at(args[0], index, dim)
        free = dim if packet is _aten.topk else None
        self.made.append(_weighed(index, best, values, free, self._choices.dtype))
        return type(result)((values, index)) if packet in _WITH_VALUES else index

    def _like_before(self, own: torch.Tensor, scores: torch.Tensor, dim: int | None) -> torch.Tensor:
        """The choice to follow."""
        place = len(self.made)
        if self._followed is None or place >= len(self._followed) or self._followed[place].shape != own.shape:
            raise UnlikeError(f"choice {place + 1} has no like before: {list(own.shape)}")
        index = self._followed[place].to(own.device, own.dtype)
        among = scores.numel() if dim is None else scores.shape[dim] if scores.dim() else 1
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < among:
            raise UnlikeError(f"choice {place + 1} is not among the {among} there are")
        return index


def _weighed(
    index: torch.Tensor, best: torch.Tensor, values: torch.Tensor, free: int | None, dtype: torch.dtype | None
) -> Choice:
    """A choice whose values are beside the best ones; along a dimension the order may be free."""
    if not best.numel():
        return Choice(index)
    if free is not None and best.dim():
        best, values = best.sort(free).values, values.sort(free).values
    wide = best.double()
    against = (wide - values.double()).abs().masked_fill((best == values) | (best.isnan() & values.isnan()), 0.0)
    if best.is_floating_point():
        excess = torch.where(against == 0, 0.0, against / tolerance(wide, dtype or best.dtype))
    else:
        excess = torch.where(against == 0, 0.0, torch.inf)
    largest = wide.nan_to_num(0, 0, 0).abs().max()
    return Choice(index, *torch.stack([against.max(), largest, excess.max()]).tolist())


def _dim_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The dimension that is chosen along; None for all of them."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dim":
            given = args[place] if not argument.kwarg_only and place < len(args) else argument.default_value
            dim: int | None = kwargs.get("dim", given)
            return dim
    return None


def _at(scores: torch.Tensor, index: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The values at some places, in the shape of the index."""
    if dim is None:
        return scores.reshape(-1)[index]
    if index.dim() == scores.dim():
        return scores.gather(dim, index) if scores.dim() else scores
    return scores.gather(dim, index.unsqueeze(dim)).squeeze(dim)
