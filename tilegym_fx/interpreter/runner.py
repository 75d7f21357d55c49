"""Runs a kernel's grid, block after block, on CPU tensors."""

from __future__ import annotations

import inspect
import itertools
import traceback
import typing
from collections.abc import Callable, Sequence
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter.errors import InterpreterError, TileTypeError
from tilegym_fx.interpreter.memory import Array
from tilegym_fx.interpreter.namespace import Namespace
from tilegym_fx.interpreter.rebind import Rebinder
from tilegym_fx.interpreter.tile import Scalar, Tile

#: CUDA's limits for the number of blocks along x, y and z.
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


def interpret(kernel: ct.kernel, grid: Sequence[int], args: Sequence[Any]) -> None:
    """Run ``kernel`` on CPU tensors, which it changes in place.

    Args:
        kernel: A function decorated with ``@ct.kernel``.
        grid: One to three block counts.
        args: The kernel's arguments, as ``ct.launch`` takes them.

    Raises:
        InterpreterError: The kernel does something that cuTile refuses or leaves undefined, or that the
            interpreter does not know. The message names the kernel, the block and the line.
    """
    function = _python_function(kernel)
    counts = _block_counts(function.__name__, grid)
    namespace = Namespace(counts)
    values = _bind(function, args)
    body = Rebinder(namespace).function(function)
    with torch.no_grad():
        for z, y, x in itertools.product(*(range(n) for n in reversed(counts))):
            namespace.block = (Scalar(x), Scalar(y), Scalar(z))
            try:
                body(*values)
            except InterpreterError as problem:
                raise _located(problem, function, (x, y, z)) from problem


def _python_function(kernel: ct.kernel) -> Any:
    function = getattr(kernel, "_pyfunc", None)
    if not inspect.isfunction(function):
        raise InterpreterError(f"{kernel!r} is no cuTile kernel", advice="Decorate the function with @ct.kernel")
    return function


def _block_counts(name: str, grid: Sequence[int]) -> tuple[int, int, int]:
    counts = tuple(grid)
    if not 1 <= len(counts) <= 3 or any(type(n) is not int or n < 1 for n in counts):
        raise InterpreterError(
            f"kernel {name} with grid {counts}", advice="A grid is a tuple of one to three positive integers"
        )
    if any(n > limit for n, limit in zip(counts, _GRID_LIMITS, strict=False)):
        raise InterpreterError(
            f"kernel {name} with grid {counts}, over CUDA's limits {_GRID_LIMITS}",
            advice="Put the largest count on axis 0, or let each block do more",
        )
    x, y, z = (*counts, 1, 1)[:3]
    return x, y, z


def _bind(function: Callable[..., None], args: Sequence[Any]) -> list[Any]:
    """The arguments as kernel values, by the parameters' annotations."""
    parameters = inspect.signature(function).parameters
    if len(parameters) != len(args):
        raise InterpreterError(
            f"kernel {function.__name__} takes {len(parameters)} arguments, but got {len(args)}",
            advice="Give one argument for each parameter, constants included",
        )
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        _kernel_value(arg, getattr(hints.get(name), "__metadata__", ()), name)
        for name, arg in zip(parameters, args, strict=True)
    ]


def _kernel_value(arg: Any, annotations: Sequence[Any], name: str) -> Any:
    constant = any(isinstance(a, ct.ConstantAnnotation) for a in annotations)
    if isinstance(arg, torch.Tensor):
        if constant:
            raise TileTypeError(f"the tensor argument {name!r} is annotated as a constant")
        return _array(arg, annotations)
    if isinstance(arg, (tuple, list)):
        return type(arg)(_kernel_value(item, annotations, name) for item in arg)
    if not isinstance(arg, (bool, int, float)):
        raise TileTypeError(f"the argument {name!r} is a {type(arg).__name__}; kernels take tensors and numbers")
    if constant or isinstance(arg, bool):
        return arg
    if isinstance(arg, int):
        wide = any(getattr(a, "dtype", None) == ct.int64 for a in annotations)
        return Scalar(arg, ct.int64 if wide else ct.int32)
    return Tile(torch.tensor(arg, dtype=torch.float32), ct.float32)


def _array(tensor: torch.Tensor, annotations: Sequence[Any]) -> Array:
    for note in annotations:
        if isinstance(note, ct.ArrayAnnotation):
            return Array(
                tensor,
                static_shape=getattr(note, "static_shape_dims", ()),
                static_strides=getattr(note, "static_stride_dims", ()),
                index_dtype=note.index_dtype,
            )
    return Array(tensor)


def _located(problem: InterpreterError, function: Callable[..., None], block: tuple[int, int, int]) -> InterpreterError:
    """The same problem with the kernel, the block and the line in front."""
    home = inspect.getfile(function)
    lines = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename == home]
    where = f" ({home.rsplit('/', 1)[-1]}:{lines[-1].lineno})" if lines else ""
    what = f"kernel {function.__name__}, block {block}{where}: {problem.what}"
    return type(problem)(what, advice=problem.next_step)
