"""What cuTile's compiler may assume about a kernel's arguments: as plain data, and as its own objects.

That is what it assumes of a launch's arguments, so that what is compiled here is what would run. Written after the
names of kernels that ran on an H200, and compared there with `KernelSignature.from_kernel_args`, which needs a driver.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import compilation

from tilegym_fx.launch import CompileError

#: A kernel is told whether an address or a stride is a multiple of this many bytes, and nothing of other multiples.
_ALIGNMENT = 16
#: The same of a length, in elements.
_LENGTH = 16


def describe(kernel: ct.kernel, args: Sequence[Any]) -> list[dict[str, Any]]:
    """What the compiler may assume about each argument, as plain data.

    Raises:
        CompileError: An argument that kernels cannot take, or a wrong number of them.
    """
    function = kernel._pyfunc
    names = list(inspect.signature(function).parameters)
    if len(names) != len(args):
        raise CompileError(
            f"kernel {function.__name__} takes {len(names)} arguments, but got {len(args)}",
            advice="Give one argument for each parameter, constants included",
        )
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        _describe(arg, getattr(hints.get(name), "__metadata__", ()), name)
        for name, arg in zip(names, args, strict=True)
    ]


def _describe(arg: Any, notes: Iterable[Any], name: str) -> dict[str, Any]:
    if isinstance(arg, torch.Tensor):
        return _describe_tensor(arg, notes)
    if not isinstance(arg, (bool, int, float)):
        raise CompileError(
            f"the argument {name!r} is a {type(arg).__name__}",
            advice="Kernels take tensors, bools, ints and floats",
        )
    if any(type(note).__name__ == "ConstantAnnotation" for note in notes):
        return {"constant": arg}
    if isinstance(arg, bool):
        return {"scalar": "bool_"}
    if isinstance(arg, float):
        return {"scalar": "float32"}
    wide = any(getattr(note, "dtype", None) is not None and note.dtype.name == "int64" for note in notes)
    return {"scalar": "int64" if wide else "int32"}


def _describe_tensor(tensor: torch.Tensor, notes: Iterable[Any]) -> dict[str, Any]:
    array = next((note for note in notes if type(note).__name__ == "ArrayAnnotation"), None)
    static_shape = {d % tensor.ndim for d in getattr(array, "static_shape_dims", ())}
    static_strides = {d % tensor.ndim for d in getattr(array, "static_stride_dims", ())}
    lengths = list(zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.storage_offset() * tensor.itemsize if tensor.is_meta else tensor.data_ptr()
    wide = _ALIGNMENT // math.gcd(tensor.itemsize, _ALIGNMENT)
    return {
        "array": str(tensor.dtype).removeprefix("torch."),
        "ndim": tensor.ndim,
        "index_dtype": array.index_dtype.name if array is not None else "int32",
        "shape_constant": [n if d in static_shape or n == 1 else None for d, (n, _) in enumerate(lengths)],
        "shape_divisible_by": [1 if n % _LENGTH else _LENGTH for n, _ in lengths],
        "stride_constant": [
            s if d in static_strides or (s == 1 and not static_strides) else None for d, (_, s) in enumerate(lengths)
        ],
        "stride_divisible_by": [1 if s % wide else wide for _, s in lengths],
        "base_addr_divisible_by": 1 if offset % _ALIGNMENT else _ALIGNMENT,
        "may_alias_internally": _may_alias(lengths),
        "alias_groups": [],
    }


def _may_alias(lengths: Iterable[tuple[int, int]]) -> bool:
    """Whether two indices may mean one place, judged as cuTile does: dimensions of length 1 count like others."""
    reach = 1
    for stride, length in sorted((s, n) for n, s in lengths):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def signature(parameters: Iterable[dict[str, Any]]) -> compilation.KernelSignature:
    """The signature that :func:`describe` described."""
    constraints: list[Any] = []
    static_shapes = False
    for parameter in parameters:
        options = dict(parameter)
        if "constant" in options:
            constraints.append(compilation.ConstantConstraint(options["constant"]))
        elif "scalar" in options:
            constraints.append(compilation.ScalarConstraint(getattr(ct, options["scalar"])))
        else:
            dtype, rank = options.pop("array"), options.pop("ndim")
            index_dtype = getattr(ct, options.pop("index_dtype"))
            if all(length is None for length in options["shape_constant"]):
                del options["shape_constant"]  # needs a newer calling convention
            else:
                static_shapes = True
            constraints.append(
                compilation.ArrayConstraint(
                    getattr(ct, "bool_" if dtype == "bool" else dtype), rank,
                    index_dtype=index_dtype, stride_lower_bound_incl=0, **options,
                )
            )  # fmt: skip
    convention = compilation.CallingConvention
    version = convention.cutile_python_v2 if static_shapes else convention.cutile_python_v1
    return compilation.KernelSignature(constraints, version())
