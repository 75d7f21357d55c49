"""Compiling in this process, where cuTile runs the compiler proper, tileiras, as a child of its own."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tilegym_fx.compile.errors import CompileError
from tilegym_fx.compile.signature import signature

if TYPE_CHECKING:
    import cuda.tile as ct

#: Variables that make tileiras load the libnvvm of another toolkit.
_FOREIGN_TOOLKIT = ("CUDA_HOME", "CUDA_PATH")
_LONGEST = 500


def compile_here(
    kernel: ct.kernel, parameters: Iterable[dict[str, Any]], arch: str, timeout: float | None
) -> bytes:
    """See :func:`tilegym_fx.compile.compile_kernel`; the arguments are described already."""
    import cuda.tile as ct
    from cuda.tile.compilation import export_kernel

    name = kernel._pyfunc.__name__
    result = io.BytesIO()
    try:
        symbol = signature(parameters).with_mangled_symbol(name)
        with contextlib.nullcontext() if timeout is None else ct.compiler_timeout(timeout):
            export_kernel(kernel, [symbol], result, gpu_code=arch, output_format="cubin")
    except FileNotFoundError as problem:
        advice = 'Install it with `pip install "cuda-tile[tileiras]"`'
        raise CompileError(
            f"kernel {name}: cuTile's compiler tileiras is not installed", advice=advice
        ) from problem
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


def readable(problem: ct.TileError, name: str, target: str = "") -> CompileError:
    """cuTile's error on one line, with the cause that its text hides when it is a foreign toolkit.

    Args:
        problem: What cuTile raised.
        name: The kernel's name.
        target: `` for sm_90``, or nothing when it is the GPU at hand.
    """
    import cuda.tile as ct

    location = problem.loc
    place = f" ({os.path.basename(location.filename)}:{location.line})" if location.filename else ""
    message = " ".join(problem.message.split())[:_LONGEST]
    found = [variable for variable in _FOREIGN_TOOLKIT if os.environ.get(variable)]
    advice = None
    if isinstance(problem, ct.TileCompilerExecutionError):
        advice = (
            "Check that tileiras, ptxas and libnvvm are of one version, and that it knows this architecture"
        )
        if found:
            advice = (
                f"Unset {' and '.join(found)}: they make tileiras load the libnvvm of another CUDA toolkit,"
                " which fails like this"
            )
    return CompileError(f"kernel {name}{place} does not compile{target}: {message}", advice=advice)
