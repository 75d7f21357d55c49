"""Launching a cuTile kernel: on the current CUDA stream, or through the interpreter for CPU tensors."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, ClassVar

import cuda.tile as ct
import torch

from tilegym_fx import recording
from tilegym_fx.errors import INSTALL_CUTILE, KernelError

# Looked up once: a launch takes a few microseconds, of which attribute chains would be a visible part.
_cuda_launch = ct.launch
# A CPU build of torch has neither; there no tensor is on a GPU.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

H200_PROCESSORS = 132
#: The first architecture on which a kernel can start before the one ahead of it has ended.
_OVERLAPPING = 90
_LONGEST_MESSAGE = 500
_COMPILER_FAILED = "Check that tileiras, ptxas and libnvvm are of one version, and that it knows this architecture"
_FOREIGN_TOOLKIT = (
    "Unset CUDA_HOME and CUDA_PATH: they make tileiras load the libnvvm of another CUDA toolkit, which fails like this"
)
_NO_SOURCE = (
    "Keep the kernel's file as it was imported: cuTile reads it at the first launch, and again for other arguments"
)


class CompileError(KernelError):
    """cuTile's compiler refuses a kernel, fails, or takes too long."""

    advice: ClassVar[str] = "Correct the kernel at the named line, or leave this variant out"


def launch(kernel: ct.kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Run ``kernel`` over ``grid``.

    The device is that of the first tensor in ``args``. On a GPU the kernel is queued on the device's current
    stream, asked for at every call because a kept one would be the wrong one inside a CUDA graph capture. A
    kernel that calls ``ct.grid_dependency_control_wait``, which it must do before it touches memory, is launched so
    that it may start before its predecessor has ended. On the CPU the interpreter has run the kernel when this
    returns.

    Args:
        kernel: A function decorated with ``@ct.kernel``.
        grid: One to three positive block counts.
        args: The kernel's arguments in order; at least one is a tensor, and all tensors are on one device.

    Raises:
        KernelError: There is no tensor, or it is on a device that has no kernels.
        CompileError: On a GPU, the kernel is compiled for these arguments the first time, and that failed.
        InterpreterError: On the CPU, what the interpreter found wrong.
    """
    if recording.note(kernel, grid, args):
        return
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if not arg.is_cuda:
                return _launch_off_gpu(arg, kernel, grid, args)
            device = arg.get_device()
            try:
                if device == _current_device():
                    return _launch_on_gpu(device, kernel, grid, args)
                with torch.cuda.device(device):  # the default stream is 0 on every device
                    return _launch_on_gpu(device, kernel, grid, args)
            except ct.TileError as problem:
                raise readable(problem, kernel._pyfunc.__name__) from problem
            except OSError as problem:
                raise missing(problem, kernel._pyfunc.__name__) from problem
    raise KernelError(f"{_name(kernel)} launched without a tensor argument", advice="Pass the tensors it works on")


def _launch_on_gpu(device: int, kernel: ct.kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    if may_start_early(kernel, device):
        _cuda_launch(_current_stream(device), grid, kernel, args, programmatic_dependent_launch=True)
    else:
        _cuda_launch(_current_stream(device), grid, kernel, args)


@cache
def may_start_early(kernel: ct.kernel, device: int) -> bool:
    """Whether a kernel waits for its predecessor by itself, on a GPU that knows how."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= _OVERLAPPING and "grid_dependency_control_wait" in kernel._pyfunc.__code__.co_names


@cache
def with_hints(kernel: ct.kernel, occupancy: int, worker_warps: int = 0, cluster: int = 1) -> ct.kernel:
    """The kernel with these launch hints; each has compiled code of its own.

    Args:
        kernel: Any kernel.
        occupancy: Blocks that are to fit a multiprocessor.
        worker_warps: Warps of a block that compute, or 0 to leave them to the compiler.
        cluster: Thread blocks that work on one tile block together.
    """
    ctas = None if cluster == 1 else cluster
    return kernel.replace_hints(occupancy=occupancy, num_worker_warps=worker_warps or None, num_ctas=ctas)


@cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; off the GPU those of an H200, so that kernels are laid out as there."""
    if device.type != "cuda":
        return H200_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def covering_power(size: int) -> int:
    """The smallest power of two that is not below ``size``, 1 or more: a tile's side."""
    return 1 << (size - 1).bit_length()


def _launch_off_gpu(tensor: torch.Tensor, kernel: ct.kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    if tensor.device.type != "cpu":
        raise KernelError(
            f"{_name(kernel)} launched on a {tensor.device.type} tensor",
            advice="Kernels take CUDA and CPU tensors",
        )
    from tilegym_fx.interpreter import interpret  # only users of the CPU path pay for importing it

    interpret(kernel, grid, args)


def readable(problem: ct.TileError, name: str, target: str = "") -> CompileError:
    """cuTile's error on one line, with the place in the kernel and what to do about it.

    Args:
        problem: What cuTile raised.
        name: The kernel's name.
        target: `` for sm_90``, or nothing when it is the GPU at hand.
    """
    location = problem.loc
    place = f" ({os.path.basename(location.filename)}:{location.line})" if location.filename else ""
    message = " ".join(problem.message.split())[:_LONGEST_MESSAGE]
    advice = None
    if isinstance(problem, ct.TileCompilerExecutionError):
        advice = _FOREIGN_TOOLKIT if f"{message} ".startswith("Return code 5 ") else _COMPILER_FAILED
    return CompileError(f"kernel {name}{place} does not compile{target}: {message}", advice=advice)


def missing(problem: OSError, name: str, target: str = "") -> CompileError:
    """The error for a kernel that cannot be compiled because a file is not there: the compiler, or its own.

    Args:
        problem: What cuTile, or ``inspect`` under it, raised.
        name: The kernel's name.
        target: `` for sm_90``, or nothing when it is the GPU at hand.
    """
    if isinstance(problem, FileNotFoundError):
        return CompileError(f"kernel {name}: cuTile's compiler tileiras is not installed", advice=INSTALL_CUTILE)
    return CompileError(f"kernel {name} does not compile{target}: {problem}", advice=_NO_SOURCE)


def _name(kernel: ct.kernel) -> str:
    return f"kernel {kernel._pyfunc.__name__}"
