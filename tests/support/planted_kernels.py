"""Kernels put in place of the shipped ones, on the CPU: what a judge of rewritten models must tell from right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilegym_fx import inventory, ops
from tilegym_fx.ops import registry


class Planter:
    """Every op runs its reference, as if that were its kernel, but for those that are planted.

    Args:
        patch: Takes back what is planted.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        ops.register(inventory.load())
        patch.setenv("TILEGYM_FX_INTERPRET", "1")
        for name in ops.names():
            self._put(name, None)

    def _put(self, name: str, kernel: Callable[..., Any] | None) -> None:
        self._patch.setitem(registry._ops[name]._kernels, None, kernel)

    def __call__(self, name: str, kernel: Callable[..., Any]) -> None:
        """Plants a kernel in an op."""
        self._put(name, kernel)

    def changed(self, name: str, change: Callable[[Any], Any]) -> None:
        """Plants a kernel that changes what the reference gives."""
        reference = registry._ops[name].reference
        self._put(name, lambda *args: change(reference(*args)))

    def failing(self, name: str, error: BaseException) -> None:
        """Plants a kernel that raises."""

        def kernel(*_: Any) -> Any:
            raise error

        self._put(name, kernel)
