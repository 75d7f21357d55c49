"""A CPU interpreter for cuTile kernels: numerics and bounds, without a GPU and without compiling.

``interpret(kernel, grid, args)`` runs a ``@ct.kernel`` function block by block on CPU torch tensors. See
docs/interpreter.md for what it checks, what it rounds how, and where it differs from a GPU.
"""

from __future__ import annotations

from tilegym_fx.interpreter.errors import (
    InterpreterError,
    OutOfBoundsError,
    TileTypeError,
    UnsupportedOpError,
)
from tilegym_fx.interpreter.runner import interpret

__all__ = ["InterpreterError", "OutOfBoundsError", "TileTypeError", "UnsupportedOpError", "interpret"]
