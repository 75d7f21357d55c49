"""Inductor is told, before it compiles anything, to call our ops as they are.

Left alone it does the same, at the first call that it meets of each op; but then torch 2.11 writes the call's
arguments, and all that they were computed from, into a log message that nobody reads. Where an op first comes up at
the end of a deep model, as the head's norm does, that text doubles with every layer: 32 never ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .registry import overloads, register_shipped

_LOWERING = "torch._inductor.lowering"


def lower_as_calls() -> None:
    """Register every op with inductor, those that no call has made yet too, in the form that inductor would give it.

    Where nothing has loaded inductor yet, which takes a second, it is done when something does.
    """
    if _LOWERING in sys.modules:
        _register()
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _register() -> None:
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    register_shipped()
    for op in overloads():
        if op not in lowerings:
            make_fallback(op, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(op)), warn=False)


class _WhenLoaded(MetaPathFinder):
    """Sees inductor's lowerings being imported, and registers our ops behind them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _LOWERING else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _register()

        loader.exec_module = exec_module
        return spec
