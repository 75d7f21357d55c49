"""What the code of a module reads besides the module: followed by names from `forward` on, as it is in this process.

Code looks names up when it runs, so that whoever exchanges what they stand for changes what a model computes, while the
text of its classes stays as it is: a function of a file, an entry of a table of attention functions,
``torch.nn.functional.scaled_dot_product_attention``. What is found may be more than what a call reads, never less,
but for names that are made as strings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from logging import Logger
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from .authored.functions import DECORATORS_FROM, layers

#: Packages whose own code is not followed: what stands under their names is looked at, and no further.
_FAR = frozenset({"torch", "numpy", *sys.stdlib_module_names})
#: Objects that change by themselves, or hold half the process.
_TOLD_BY_TYPE = (Logger, ModuleType, torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
Found = tuple[str, Any]


def reached(classes: Iterable[type]) -> Iterator[Found]:
    """What calls of objects of these classes can read by names, each once, in an order that every process finds.

    Args:
        classes: Of modules; each call begins in `forward`.

    Yields:
        A name, and what it stands for.
    """
    walk = _Walk()
    for cls in classes:
        yield from walk.class_(cls, {"forward"})


def unwrapped(held: Any) -> Any:
    """The function in a static method, a class method or a property."""
    if isinstance(held, staticmethod | classmethod):
        held = held.__func__
    return held.fget if isinstance(held, property) else held


def inside(held: Any) -> Iterable[tuple[Any, Any]]:
    """What is in a container or an object, with its names."""
    if isinstance(held, Mapping):
        return held.items()
    if isinstance(held, list | tuple):
        return enumerate(held)
    if isinstance(held, set | frozenset):
        return enumerate(sorted(held, key=repr))
    return () if isinstance(held, _TOLD_BY_TYPE) else getattr(held, "__dict__", {}).items()


class _Walk:
    """Goes from function to function; knows where it has been."""

    def __init__(self) -> None:
        self._been: dict[int, frozenset[str]] = {}

    def class_(self, cls: type, names: Iterable[str]) -> Iterator[Found]:
        """Attributes of a class under some names, and under the names in the methods that are found."""
        waiting, done = sorted(names), set()
        while waiting:
            name = waiting.pop()
            held = next((vars(base)[name] for base in cls.__mro__ if name in vars(base) and not _is_far(base)), None)
            if name in done or held is None:
                continue
            done.add(name)
            yield from self.value(name, held)
            waiting += [name for layer in _layers(held) for name in sorted(_names(layer.__code__))]

    def value(self, name: str, held: Any) -> Iterator[Found]:
        """What a name stands for, and what that reads."""
        held = unwrapped(held)
        if id(held) in self._been:
            return
        self._been[id(held)] = frozenset()
        yield name, held
        for layer in _layers(held):
            yield from self._function(layer)
        if isinstance(held, type) and not _is_far(held):
            yield from self.class_(held, {"forward", "__call__"})
        if not isinstance(held, type | FunctionType):
            for key, inner in inside(held):
                if isinstance(inner, type | FunctionType):
                    yield from self.value(f"{name}[{key!s}]", inner)

    def _function(self, function: FunctionType) -> Iterator[Found]:
        names = _names(function.__code__)
        for name in sorted(names & function.__globals__.keys()):
            yield from self._named(name, function.__globals__[name], names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell may still be empty
                yield from self.value(name, cell.cell_contents)

    def _named(self, name: str, held: Any, names: frozenset[str]) -> Iterator[Found]:
        """Of a module only what some names stand for."""
        if type(held) is not ModuleType:  # others are filled as their names are asked for
            yield from self.value(name, held)
            return
        known = self._been.get(id(held), frozenset())
        if names <= known:
            return
        self._been[id(held)] = names | known
        for inner in sorted(names & vars(held).keys()):
            if (
                _package(held.__name__) not in _FAR
                or callable(vars(held)[inner])
                or type(vars(held)[inner]) is ModuleType
            ):
                yield from self._named(f"{name}.{inner}", vars(held)[inner], names)


def _layers(held: Any) -> Iterator[FunctionType]:
    """A function and those around it whose code is followed; of packages that are known, decorators are not."""
    for layer in layers(unwrapped(held)):
        known = _FAR.union(DECORATORS_FROM) if hasattr(layer, "__wrapped__") else _FAR
        if _package(layer.__globals__.get("__name__")) not in known:
            yield layer


def _names(code: CodeType) -> frozenset[str]:
    """Of globals and attributes, in functions inside of it too."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_far(cls: type) -> bool:
    return _package(cls.__module__) in _FAR


def _package(module: Any) -> str:
    return str(module).partition(".")[0]
