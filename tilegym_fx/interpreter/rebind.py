"""The kernel's Python code with ``cuda.tile`` replaced, without touching the kernel, its module or cuda.tile.

A function is rebuilt over a new globals dict that holds only the names its code uses. Helpers it calls,
closures and helpers in other modules are rebuilt the same way.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct

from tilegym_fx.interpreter.namespace import BUILTINS, Namespace


class ModuleView:
    """A module of kernel helpers whose attributes are rebuilt when they are read."""

    def __init__(self, module: ModuleType, rebinder: Rebinder) -> None:
        self._module = module
        self._rebinder = rebinder

    def __getattr__(self, name: str) -> Any:
        return self._rebinder.value(getattr(self._module, name))


class Rebinder:
    """Rebuilds functions for one interpretation.

    Args:
        namespace: What stands for ``cuda.tile``.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._builtins = {**vars(builtins), **BUILTINS}
        self._done: dict[int, FunctionType] = {}

    def function(self, function: FunctionType) -> FunctionType:
        """``function`` over the interpreter's namespace."""
        if id(function) in self._done:
            return self._done[id(function)]
        new_globals: dict[str, Any] = {"__builtins__": self._builtins, "__name__": function.__module__}
        closure = function.__closure__ and tuple(CellType() for _ in function.__closure__)
        rebuilt = FunctionType(function.__code__, new_globals, function.__name__, None, closure)
        self._done[id(function)] = rebuilt
        for name in _names(function.__code__):
            if name in function.__globals__:
                new_globals[name] = self.value(function.__globals__[name])
        for old, new in zip(function.__closure__ or (), closure or (), strict=True):
            new.cell_contents = self.value(old.cell_contents)
        rebuilt.__defaults__ = function.__defaults__ and tuple(map(self.value, function.__defaults__))
        rebuilt.__kwdefaults__ = {k: self.value(v) for k, v in (function.__kwdefaults__ or {}).items()}
        return rebuilt

    def value(self, value: Any) -> Any:
        """``value`` as the kernel should see it."""
        if value is ct:
            return self._namespace
        if isinstance(value, ModuleType):
            return ModuleView(value, self) if any(v is ct for v in vars(value).values()) else value
        if not isinstance(value, FunctionType):
            return value
        if value.__module__.startswith("cuda.tile"):
            return getattr(self._namespace, value.__name__)
        if value.__globals__.get("__name__", "").startswith("cuda.tile"):
            return self.function(inspect.unwrap(value))  # a helper under @ct.function
        return self.function(value)


def _names(code: CodeType) -> Iterator[str]:
    """Every global name that the code, or code nested in it, may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
