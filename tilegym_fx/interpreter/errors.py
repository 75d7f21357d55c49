"""What can go wrong inside an interpreted kernel."""

from __future__ import annotations

from typing import ClassVar

from tilegym_fx.errors import KernelError


class InterpreterError(KernelError):
    """A kernel does something that cuTile refuses or leaves undefined."""

    advice: ClassVar[str] = "docs/interpreter.md lists what the interpreter checks and why"


class UnsupportedOpError(InterpreterError):
    """The kernel uses a cuTile operation that the interpreter does not know."""

    advice: ClassVar[str] = "Write it with the operations listed in docs/interpreter.md, or add it to the interpreter"


class TileTypeError(InterpreterError):
    """Dtypes, shapes or constants that cuTile's compiler refuses."""

    advice: ClassVar[str] = "cuTile's compiler refuses this too: cast, broadcast or make it a constant explicitly"


class OutOfBoundsError(InterpreterError):
    """An access outside an array whose result cuTile leaves undefined."""

    advice: ClassVar[str] = "On a GPU this reads or writes foreign memory: correct the index, or pad, mask or guard it"
