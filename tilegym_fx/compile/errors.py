"""The one error of this package."""

from __future__ import annotations

from typing import ClassVar

from tilegym_fx.errors import KernelError


class CompileError(KernelError):
    """cuTile's compiler refuses a kernel, fails, or takes too long."""

    advice: ClassVar[str] = "Correct the kernel at the named line, or leave this variant out"
