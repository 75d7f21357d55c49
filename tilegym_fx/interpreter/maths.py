"""Element-wise functions, reductions and matrix products, rounded as the GPU rounds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter import dtypes
from tilegym_fx.interpreter.checks import axis_in
from tilegym_fx.interpreter.errors import TileTypeError
from tilegym_fx.interpreter.tile import NUMBERS, OPS, Scalar, Tile, as_tile, binary, common_dtype, operand

#: x dtype of ct.mma -> the accumulator dtypes that it takes; the first is ct.matmul's.
_ACCUMULATORS: dict[ct.DType, tuple[ct.DType, ...]] = {
    ct.float16: (ct.float16, ct.float32),
    ct.bfloat16: (ct.float32,),
    ct.float32: (ct.float32,),
    ct.tfloat32: (ct.float32,),
    ct.float64: (ct.float64,),
    ct.int8: (ct.int32,),
    ct.uint8: (ct.int32,),
}
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def _flushed(data: torch.Tensor) -> torch.Tensor:
    return torch.where(data.abs() < _SMALLEST_NORMAL, torch.zeros_like(data), data)


def _check_modes(name: str, dtype: ct.DType, rounding_mode: Any, flush_to_zero: bool) -> None:
    nearest = (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX)
    if rounding_mode not in nearest:
        raise TileTypeError(f"{name} with rounding mode {rounding_mode}, which the interpreter does not know")
    approximate = rounding_mode in (ct.RoundingMode.FULL, ct.RoundingMode.APPROX)
    if (approximate or flush_to_zero) and dtype != ct.float32:
        raise TileTypeError(f"{name} of {dtype.name} with rounding_mode={rounding_mode}, flush_to_zero={flush_to_zero}")


def unary(
    name: str, tensors: Callable[[torch.Tensor], torch.Tensor], numbers: Callable[[Any], Any], integers: str
) -> Callable[..., Any]:
    """A function of one tile.

    Args:
        name: As in ``ct.<name>``.
        tensors: Computes it on a tensor.
        numbers: Computes it on a Python number (a compile-time constant).
        integers: What integers do: ``float`` (become float32), ``keep`` or ``refuse``.
    """

    def apply(x: Any, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        if isinstance(x, NUMBERS):
            return numbers(x)
        tile = as_tile(x)
        if dtypes.category(tile.dtype) != dtypes.FLOAT:
            tile = _promoted(name, tile, integers)
        _check_modes(name, tile.dtype, rounding_mode, flush_to_zero)
        data = tensors(_flushed(tile.data) if flush_to_zero else tile.data)
        return Tile(_flushed(data) if flush_to_zero else data, tile.dtype)

    apply.__name__ = name
    return apply


def _promoted(name: str, tile: Tile, integers: str) -> Tile:
    if integers == "refuse":
        raise TileTypeError(f"{name} of {tile.dtype.name}; it takes floats only")
    if integers == "float":
        return Tile(tile.data.to(torch.float32), ct.float32)
    return Tile(tile.data.to(torch.int32), ct.int32) if tile.dtype == ct.bool_ else tile


def binary_function(name: str, with_nan: bool = False) -> Callable[..., Any]:
    """``ct.<name>(x, y)``."""
    op = OPS[name]

    def apply(
        x: Any, y: Any, *, rounding_mode: Any = None, flush_to_zero: bool = False, propagate_nan: bool = False
    ) -> Any:
        chosen = OPS[f"{name}_nan"] if with_nan and propagate_nan else op
        if rounding_mode is None and not flush_to_zero:
            return binary(chosen, x, y)
        result = binary(chosen, x, y)
        dtype = result.dtype if isinstance(result, Tile | Scalar) else ct.float32
        _check_modes(name, dtype, rounding_mode, flush_to_zero)
        return Tile(_flushed(result.data), dtype) if flush_to_zero and isinstance(result, Tile) else result

    apply.__name__ = name
    return apply


def python_max(x: Any, y: Any) -> Any:
    """The builtin ``max`` of two values, as kernels may call it."""
    return binary(OPS["maximum"], x, y)


def python_min(x: Any, y: Any) -> Any:
    """The builtin ``min`` of two values, as kernels may call it."""
    return binary(OPS["minimum"], x, y)


def rsqrt_of_number(x: float) -> float:
    return 1.0 / math.sqrt(x)


def isnan(x: Any) -> Any:
    """``ct.isnan``."""
    return math.isnan(x) if isinstance(x, NUMBERS) else Tile(torch.isnan(as_tile(x).data), ct.bool_)


def where(cond: Any, x: Any, y: Any) -> Tile:
    """``ct.where``."""
    dtype = common_dtype(x, y)
    held = dtypes.TORCH[dtype]
    choice = as_tile(cond).data
    first, second = operand(x, dtype), operand(y, dtype)
    if not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor):
        first = torch.tensor(first, dtype=held)
    try:
        return Tile(torch.where(choice if choice.dtype == torch.bool else choice != 0, first, second), dtype)
    except RuntimeError as problem:
        raise TileTypeError(f"where of {cond!r}, {x!r} and {y!r}: {problem}") from problem


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(axis_in(a, ndim) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))


def _pairwise(data: torch.Tensor, axis: int, combine: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
    """Fold one axis in halves, rounding to the tensor's dtype at each step, and keep it with length one."""
    while data.shape[axis] > 1:
        first, second = data.chunk(2, dim=axis)
        data = combine(first, second)
    return data


def fold(name: str) -> Callable[..., Tile]:
    """``ct.sum`` or ``ct.prod``.

    A float16 or bfloat16 tile is folded in that dtype, pair by pair: on a GPU too, partial sums are rounded.
    """
    combine = OPS["add" if name == "sum" else "mul"].tensors

    def apply(
        x: Any,
        axis: Any = None,
        *,
        keepdims: bool = False,
        rounding_mode: Any = None,
        flush_to_zero: bool = False,
    ) -> Tile:
        tile = _arithmetic(name, x)
        _check_modes(name, tile.dtype, rounding_mode, flush_to_zero)
        axes = sorted(_axes(axis, tile.ndim), reverse=True)
        data = tile.data
        if name == "sum" and axes and tile.dtype not in dtypes.HALVES:
            return Tile(torch.sum(data, dim=axes, keepdim=keepdims, dtype=data.dtype), tile.dtype)
        for a in axes:
            data = _pairwise(data, a, combine)
        return Tile(data if keepdims else data.squeeze(axes), tile.dtype)

    apply.__name__ = name
    return apply


def extreme(name: str) -> Callable[..., Tile]:
    """``ct.max`` or ``ct.min``; a NaN loses against every number unless ``propagate_nan``."""
    reduce = torch.amax if name == "max" else torch.amin
    loser = -math.inf if name == "max" else math.inf

    def apply(
        x: Any,
        axis: Any = None,
        *,
        keepdims: bool = False,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        tile = _arithmetic(name, x)
        _check_modes(name, tile.dtype, None, flush_to_zero)
        axes = _axes(axis, tile.ndim)
        data = reduce(tile.data, dim=axes, keepdim=keepdims) if axes else tile.data
        if not propagate_nan and dtypes.category(tile.dtype) == dtypes.FLOAT and bool(data.isnan().any()):
            cleaned = torch.where(tile.data.isnan(), loser, tile.data)
            data = reduce(cleaned, dim=axes, keepdim=keepdims) if axes else cleaned
        return Tile(data, tile.dtype)

    apply.__name__ = name
    return apply


def arg_extreme(name: str) -> Callable[..., Tile]:
    """``ct.argmax`` or ``ct.argmin``: the first index on a tie."""
    loser = -math.inf if name == "argmax" else math.inf
    best = torch.amax if name == "argmax" else torch.amin

    def apply(x: Any, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        tile = _arithmetic(name, x)
        if propagate_nan:
            raise TileTypeError(f"{name} with propagate_nan, which the interpreter does not know")
        data = tile.data if axis is not None else tile.data.reshape(-1)
        a = axis_in(axis, tile.ndim) if axis is not None else 0
        if dtypes.category(tile.dtype) == dtypes.FLOAT:
            data = torch.where(data.isnan(), loser, data)
        hits = data == best(data, dim=a, keepdim=True)
        index = hits.to(torch.int32).argmax(dim=a, keepdim=keepdims and axis is not None).to(torch.int32)
        return Tile(index.reshape((1,) * tile.ndim) if axis is None and keepdims else index, ct.int32)

    apply.__name__ = name
    return apply


def cumulate(name: str) -> Callable[..., Tile]:
    """``ct.cumsum`` or ``ct.cumprod``."""
    function = torch.cumsum if name == "cumsum" else torch.cumprod

    def apply(
        x: Any,
        axis: Any = 0,
        *,
        reverse: bool = False,
        rounding_mode: Any = None,
        flush_to_zero: bool = False,
    ) -> Tile:
        tile = _arithmetic(name, x)
        _check_modes(name, tile.dtype, rounding_mode, flush_to_zero)
        a = axis_in(axis, tile.ndim)
        data = function(tile.data.flip(a) if reverse else tile.data, dim=a, dtype=tile.data.dtype)
        return Tile(data.flip(a) if reverse else data, tile.dtype)

    apply.__name__ = name
    return apply


def _arithmetic(name: str, x: Any) -> Tile:
    """``x`` as a tile that can be reduced: bools become int32."""
    tile = as_tile(x)
    if tile.dtype == ct.tfloat32:
        raise TileTypeError(f"{name} of tfloat32, which only ct.mma and ct.matmul take")
    return Tile(tile.data.to(torch.int32), ct.int32) if tile.dtype == ct.bool_ else tile


def mma(x: Any, y: Any, /, acc: Any, *, use_fast_acc: bool = False) -> Tile:
    """``ct.mma``: x @ y + acc, the products exact and the sums in the accumulator's dtype.

    Raises:
        TileTypeError: Dtypes or shapes that the instruction does not take.
    """
    x, y, acc = as_tile(x), as_tile(y), as_tile(acc)
    if use_fast_acc:
        raise TileTypeError(f"mma of {x.dtype.name} with use_fast_acc, which is for float8")
    _check_mma(x, y, acc.dtype)
    if x.ndim < 2 or y.ndim < 2:
        raise TileTypeError(f"mma of {x!r} and {y!r}; both must have at least two dimensions")
    product = _product(x, y)
    if tuple(product.shape) != acc.shape:
        raise TileTypeError(f"mma of {x!r} and {y!r} makes {tuple(product.shape)}, but the accumulator is {acc!r}")
    return Tile(dtypes.cast(product + acc.data.to(product.dtype), acc.dtype), acc.dtype)


def matmul(x: Any, y: Any) -> Tile:
    """``ct.matmul``: accumulated as in mma, the result in the operands' common dtype."""
    x, y = as_tile(x), as_tile(y)
    dtype = dtypes.promote(x.dtype, y.dtype)
    x, y = (Tile(dtypes.cast(tile.data, dtype), dtype) for tile in (x, y))
    _check_mma(x, y, None)
    accumulator = _ACCUMULATORS[dtype][0]
    return Tile(dtypes.cast(dtypes.cast(_product(x, y), accumulator), dtype), dtype)


def _check_mma(x: Tile, y: Tile, acc: ct.DType | None) -> None:
    eight_bits = {ct.int8, ct.uint8}
    if x.dtype != y.dtype and not {x.dtype, y.dtype} <= eight_bits:
        raise TileTypeError(f"mma of {x.dtype.name} and {y.dtype.name}, which must be equal")
    if x.dtype not in _ACCUMULATORS:
        raise TileTypeError(f"mma of {x.dtype.name}")
    if acc is not None and acc not in _ACCUMULATORS[x.dtype]:
        names = " or ".join(dtype.name for dtype in _ACCUMULATORS[x.dtype])
        raise TileTypeError(f"mma of {x.dtype.name} with a {acc.name} accumulator; it takes {names}")


def _product(x: Tile, y: Tile) -> torch.Tensor:
    wide = {ct.float64: torch.float64, ct.int8: torch.int32, ct.uint8: torch.int32}.get(x.dtype, torch.float32)
    try:
        return torch.matmul(x.data.to(wide), y.data.to(wide))
    except RuntimeError as problem:
        raise TileTypeError(f"matrix product of {x!r} and {y!r}: {problem}") from problem
