"""Compiling in this process, where cuTile runs the compiler proper, tileiras, as a child of its own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import Any

import cuda.tile as ct
from cuda.tile import compilation

from tilegym_fx.compile.signature import signature
from tilegym_fx.launch import CompileError, missing, readable


def compile_here(kernel: ct.kernel, parameters: Iterable[dict[str, Any]], arch: str, timeout: float | None) -> bytes:
    """See :func:`tilegym_fx.compile.compile_kernel`; the arguments are described already."""
    name = kernel._pyfunc.__name__
    result = io.BytesIO()
    try:
        symbol = signature(parameters).with_mangled_symbol(name)
        with contextlib.nullcontext() if timeout is None else ct.compiler_timeout(timeout):
            compilation.export_kernel(kernel, [symbol], result, gpu_code=arch, output_format="cubin")
    except OSError as problem:
        raise missing(problem, name, f" for {arch}") from problem
    except ct.TileCompilerTimeoutError as problem:
        raise timed_out(name, arch, timeout) from problem
    except ct.TileError as problem:
        raise readable(problem, name, f" for {arch}") from problem
    return result.getvalue()


def timed_out(name: str, arch: str, timeout: float | None) -> CompileError:
    """The error for a kernel that takes too long."""
    return CompileError(
        f"kernel {name} for {arch} took longer than {timeout} s to compile",
        advice="Use smaller tiles or fewer unrolled steps, or allow more time",
    )
