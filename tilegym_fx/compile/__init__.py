"""Compiling a cuTile kernel with no GPU, in this process or in a child with a time limit.

    cubin = compile_kernel(rms_norm_kernel, (x, weight, out, 1e-6, 1024), "sm_90", timeout=60)

``tilegym_fx.launch.recorded`` collects the launches of a kernel's entry point, whose arguments fit here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cuda.tile as ct

from tilegym_fx.compile.child import compile_in_child
from tilegym_fx.compile.here import compile_here
from tilegym_fx.compile.signature import describe, signature
from tilegym_fx.launch import CompileError

__all__ = ["ARCHITECTURES", "CompileError", "compile_kernel", "describe", "signature"]

#: The architectures that every kernel is compiled for in the tests.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def compile_kernel(
    kernel: ct.kernel, args: Sequence[Any], arch: str, *, timeout: float | None = None, isolated: bool = False
) -> bytes:
    """The machine code of ``kernel`` for ``arch``, specialised for arguments like ``args``.

    Args:
        kernel: A function decorated with ``@ct.kernel``.
        args: Arguments as for a launch. Tensors may be on any device, meta included: their dtype, rank, unit
            strides, alignment and shared storage count, their contents do not.
        arch: ``sm_90`` for example.
        timeout: Seconds after which compilation is given up. In this process it bounds the compiler proper,
            in a child everything.
        isolated: Compile in a child process, for variants that may hang. The kernel must be a name at the top
            of a file, which the child imports anew.

    Returns:
        A cubin.

    Raises:
        CompileError: It does not compile; one line with the place in the kernel.
    """
    parameters = describe(kernel, args)
    if isolated:
        return compile_in_child(kernel, parameters, arch, timeout)
    return compile_here(kernel, parameters, arch, timeout)
