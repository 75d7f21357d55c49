"""Layers that are the same but for the numbers in their weights: capturing a few of them tells of all.

A deep model is lists of layers, and tracing, matching and writing each of them finds the same again. So a capture sees
only the first layers of each list, until every kind of layer has come twice and one more follows; the second of a kind
stands for those that were not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MethodType
from typing import Any

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
#: What every module has; the tables among it are compared as what they hold.
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class ShortList:
    """A list of layers of which a capture sees only the first.

    Attributes:
        path: Of the list, from the model.
        layers: All of them.
        kinds: What kind of layer each is, as the place of the first of it.
        seen: How many a capture sees.
    """

    path: str
    layers: nn.ModuleList | nn.Sequential
    kinds: tuple[int, ...]
    seen: int

    @cached_property
    def members(self) -> Mapping[int, Sequence[int]]:
        """The places of each kind."""
        found: dict[int, list[int]] = defaultdict(list)
        for place, kind in enumerate(self.kinds):
            found[kind].append(place)
        return found

    @property
    def standing(self) -> Iterator[tuple[int, Sequence[int]]]:
        """A layer that is seen, and those that it stands for."""
        for places in self.members.values():
            if unseen := [place for place in places if place >= self.seen]:
                yield places[1], unseen


@dataclass(frozen=True)
class Copies:
    """Which layers of a model are not captured, and which stand for them.

    Attributes:
        model: The model.
        lists: The lists that a capture sees the first layers of.
    """

    model: nn.Module
    lists: tuple[ShortList, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lists)

    @cached_property
    def of_layer(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a layer -> the paths of those that it stands for."""
        return {
            f"{short.path}.{place}": tuple(f"{short.path}.{other}" for other in others)
            for short in self.lists
            for place, others in short.standing
        }

    def of(self, path: str) -> tuple[str, ...]:
        """The paths that one path stands for, in other layers."""
        end = len(path)
        while end > 0:
            if (others := self.of_layer.get(path[:end])) is not None:
                return tuple(other + path[end:] for other in others)
            end = path.rfind(".", 0, end)
        return ()

    @cached_property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the layers of one kind that a capture sees, for each kind that stands for others."""
        return tuple(
            tuple(f"{short.path}.{place}" for place in short.members[short.kinds[standing]] if place < short.seen)
            for short in self.lists
            for standing, _ in short.standing
        )


@contextmanager
def first_layers(model: nn.Module) -> Iterator[Copies]:
    """The lists of a model hold only their first layers meanwhile. Gives which layers stand for the others."""
    copies = Copies(model, tuple(_short_lists(model, "")))
    owners = [(model.get_submodule(s.path.rpartition(".")[0]), s.path.rpartition(".")[2], s) for s in copies.lists]
    try:
        for owner, name, short in owners:
            setattr(owner, name, short.layers[: short.seen])
        yield copies
    finally:
        for owner, name, short in owners:
            setattr(owner, name, short.layers)


def _short_lists(module: nn.Module, path: str) -> Iterator[ShortList]:
    """The outermost lists below a module that can be seen in part."""
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        short = _shortened(child, here) if type(child) in _LISTS else None
        if short is not None:
            yield short
        else:
            yield from _short_lists(child, here)


def _shortened(layers: Any, path: str) -> ShortList | None:
    if len(set(layers)) < len(layers):
        return None  # a layer that is called twice is one place for both calls
    kinds = _kinds(list(layers))
    seconds = [place for place, kind in enumerate(kinds) if kinds[:place].count(kind) == 1]
    alone = [place for place, kind in enumerate(kinds) if kinds.count(kind) == 1]
    seen = max([*seconds, *alone], default=0) + 2
    return ShortList(path, layers, tuple(kinds), seen) if seconds and seen < len(layers) else None


def _kinds(layers: list[nn.Module]) -> list[int]:
    """For each layer the place of the first that is like it."""
    described = [_Described(layer) for layer in layers]
    counting = _counting(described)
    keys = [d.key(counting) for d in described]
    return [keys.index(key) for key in keys]


def _counting(layers: Sequence[_Described]) -> frozenset[tuple[str, str]]:
    """The attributes in which each layer keeps its own place in the list, counted from anywhere."""
    first = layers[0].numbers if layers else {}
    return frozenset(
        name
        for name, value in first.items()
        if all(layer.numbers.get(name) == value + place for place, layer in enumerate(layers))
    )


@dataclass
class _Described:
    """What a layer is, but for the numbers in its weights.

    Attributes:
        parts: All that is compared, in order.
        numbers: Path below the layer and name -> value, of attributes that are whole numbers.
    """

    layer: nn.Module
    parts: list[tuple[str, str, Hashable]] = field(default_factory=list)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[int, int] = {}
        modules = list(self.layer.named_modules(remove_duplicate=False))
        self.parts += [(path, "", (type(m), m.training, _same_as(m, known))) for path, m in modules]
        for path, module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.parts.append((path, name, (_tensor(tensor), _same_as(tensor, known))))
            self.parts += [(path, name, _value(held, known)) for name, held in _own(module)]
            self.numbers |= {(path, name): held for name, held in _own(module) if type(held) is int}

    def key(self, without: frozenset[tuple[str, str]]) -> Hashable:
        return tuple(part for part in self.parts if part[:2] not in without)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes but for parameters, buffers and modules; hooks are among them where there are any."""
    tables = ("_parameters", "_buffers", "_modules", "training")
    for name, held in vars(module).items():
        if name not in tables and not (name in _OF_TORCH and not held):
            yield name, held


def _same_as(held: Any, known: dict[int, int]) -> int:
    """The number of the first of a layer's parts that is this very one: weights may be tied."""
    return -1 if held is None else known.setdefault(id(held), len(known))


def _tensor(held: torch.Tensor | None) -> Hashable:
    if held is None:
        return None
    return type(held), tuple(held.shape), held.dtype, held.device, held.layout, held.requires_grad


def _value(held: Any, known: dict[int, int]) -> Hashable:
    """Something equal where two attributes are; what is neither plain nor part of its layer is like itself alone."""
    if isinstance(held, _PLAIN):
        return type(held), held
    if type(held) in (list, tuple):
        return type(held), tuple(_value(item, known) for item in held)
    if type(held) in (set, frozenset):
        return type(held), frozenset(_value(item, known) for item in held)
    if type(held) is dict:
        return dict, tuple((_value(key, known), _value(value, known)) for key, value in held.items())
    if type(held) is partial:
        return partial, _value((held.func, held.args, held.keywords), known)
    if isinstance(held, MethodType):
        return MethodType, held.__func__, _value(held.__self__, known)
    return type(held), ("part", known[id(held)]) if id(held) in known else id(held)
