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
        held: The list itself.
        layers: All of its layers, by their paths from the model.
        kinds: What kind of layer each is, as the place of the first of it.
        seen: How many a capture sees.
    """

    held: nn.ModuleList | nn.Sequential
    layers: Mapping[str, nn.Module]
    kinds: tuple[int, ...]
    seen: int

    @cached_property
    def stands_for(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a layer that is seen -> the paths of those of its kind that are not."""
        members: dict[int, list[str]] = defaultdict(list)
        for path, kind in zip(self.layers, self.kinds, strict=True):
            members[kind].append(path)
        unseen = set(list(self.layers)[self.seen :])
        found = {paths[1]: tuple(path for path in paths if path in unseen) for paths in members.values() if paths[1:]}
        return {path: others for path, others in found.items() if others}


@dataclass(frozen=True)
class Copies:
    """Which layers of a model are not captured, and which stand for them.

    Attributes:
        model: The model.
        lists: The lists that a capture sees the first layers of.
    """

    model: nn.Module
    lists: tuple[ShortList, ...] = ()

    @classmethod
    def in_model(cls, model: nn.Module) -> Copies:
        """Those of the outermost lists that can be seen in part."""
        return cls(model, tuple(_short_lists(model, "", _homes(model))))

    def __bool__(self) -> bool:
        return bool(self.lists)

    @cached_property
    def of_layer(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a layer -> the paths of those that it stands for."""
        return {path: others for short in self.lists for path, others in short.stands_for.items()}

    def of(self, path: str) -> tuple[str, ...]:
        """The paths that one path stands for, in other layers."""
        layer = self.layer(path)
        return tuple(other + path[len(layer) :] for other in self.of_layer.get(layer, ()))

    @cached_property
    def _layers(self) -> frozenset[str]:
        return frozenset(path for short in self.lists for path in short.layers)

    def layer(self, path: str) -> str:
        """The path of the layer, of a list that is seen in part, that a path leads into; empty where it is none."""
        while path and path not in self._layers:
            path = path.rpartition(".")[0]
        return path

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The lists hold only their first layers meanwhile, whoever else holds the lists."""
        whole = [short.held._modules for short in self.lists]
        try:
            for short in self.lists:
                short.held._modules = dict(list(short.held._modules.items())[: short.seen])
            yield
        finally:
            for short, modules in zip(self.lists, whole, strict=True):
                short.held._modules = modules


def _homes(model: nn.Module) -> Mapping[int, Sequence[str]]:
    """Every path at which a model holds each of its modules, by the module's identity."""
    homes: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        homes[id(module)].append(path)
    return homes


def _short_lists(module: nn.Module, path: str, homes: Mapping[int, Sequence[str]]) -> Iterator[ShortList]:
    """The outermost lists below a module that can be seen in part."""
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        short = _shortened(child, here, homes) if type(child) in _LISTS else None
        if short is not None:
            yield short
        else:
            yield from _short_lists(child, here, homes)


def _shortened(held: Any, path: str, homes: Mapping[int, Sequence[str]]) -> ShortList | None:
    layers = {f"{path}.{name}": layer for name, layer in held._modules.items()}
    if not all(_is_only_in(at, layer, homes) for at, layer in layers.items()):
        return None
    kinds = _kinds(list(layers.values()))
    seconds = [place for place, kind in enumerate(kinds) if kinds[:place].count(kind) == 1]
    alone = [place for place, kind in enumerate(kinds) if kinds.count(kind) == 1]
    seen = max([*seconds, *alone], default=0) + 2
    return ShortList(held, layers, tuple(kinds), seen) if seconds and seen < len(layers) else None


def _is_only_in(path: str, layer: nn.Module | None, homes: Mapping[int, Sequence[str]]) -> bool:
    """Whether nothing of a layer is held elsewhere too: what is called in two places is written for both at once."""
    if layer is None:
        return False
    return all(f"{home}.".startswith(f"{path}.") for part in layer.modules() for home in homes[id(part)])


def _kinds(layers: list[nn.Module]) -> list[int]:
    """For each layer the place of the first that is like it."""
    described = [_Described(layer) for layer in layers]
    counting = _counting(described)
    keys = [d.key(counting) for d in described]
    return [keys.index(key) for key in keys]


def _counting(layers: Sequence[_Described]) -> frozenset[tuple[str, str]]:
    """The attributes in which each layer that has them keeps its own place in the list, counted from anywhere."""
    starts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        for name, value in layer.numbers.items():
            starts[name].append(value - place)
    return frozenset(name for name, found in starts.items() if len(found) > 1 and len(set(found)) == 1)


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
            self.parts += [(path, name, _value(held, known)) for name, held in own_attributes(module)]
            self.numbers |= {(path, name): held for name, held in own_attributes(module) if type(held) is int}

    def key(self, counting: frozenset[tuple[str, str]]) -> Hashable:
        return tuple(part[:2] if part[:2] in counting else part for part in self.parts)


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
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
