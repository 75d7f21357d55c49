"""cuTile's dtypes beside torch's, and cuTile's rules for mixing them.

The rules differ from torch's: signed and unsigned integers never mix, float16 and bfloat16 never mix, and a
Python number takes the dtype of the tile it meets unless its category (bool < integer < float) is the
stronger one.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter.errors import TileTypeError

BOOL, INTEGER, FLOAT = range(3)

#: cuTile dtype -> the torch dtype that holds its values. tfloat32 lives in float32 with 10 mantissa bits.
TORCH: dict[ct.DType, torch.dtype] = {
    ct.bool_: torch.bool,
    ct.uint8: torch.uint8,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.tfloat32: torch.float32,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
}
OF_TORCH: dict[torch.dtype, ct.DType] = {held: dtype for dtype, held in TORCH.items() if dtype != ct.tfloat32}
_KNOWN: dict[Any, ct.DType] = {**{dtype: dtype for dtype in TORCH}, **OF_TORCH}
HALVES = frozenset({ct.float16, ct.bfloat16})

_SIGNED = (ct.int8, ct.int16, ct.int32, ct.int64)
_WIDTH = {dtype: index for index, dtype in enumerate(_SIGNED)}
_INTEGERS = frozenset({ct.uint8, *_SIGNED})


@cache
def category(dtype: ct.DType) -> int:
    """BOOL, INTEGER or FLOAT."""
    if dtype == ct.bool_:
        return BOOL
    return INTEGER if dtype in _INTEGERS else FLOAT


def canonical(dtype: object) -> ct.DType:
    """The cuTile dtype that ``dtype`` (cuTile's or torch's) names.

    Raises:
        TileTypeError: The interpreter has no such dtype.
    """
    known = _KNOWN.get(dtype)
    if known is None:
        raise TileTypeError(f"{dtype!r} is not a dtype that the interpreter knows")
    return known


@cache
def integer_range(dtype: ct.DType) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype."""
    info = torch.iinfo(TORCH[dtype])
    return info.min, info.max


@cache
def promote(first: ct.DType, second: ct.DType) -> ct.DType:
    """The dtype in which cuTile mixes two tiles.

    Raises:
        TileTypeError: cuTile asks for an explicit cast here.
    """
    if first == second:
        return first
    if ct.tfloat32 in (first, second):
        raise _refused(first, second)
    low, high = sorted((first, second), key=category)
    if category(low) < category(high):
        return high
    if category(low) == INTEGER:
        if ct.uint8 in (first, second):
            raise _refused(first, second)
        return max(first, second, key=_WIDTH.__getitem__)
    if {first, second} == HALVES:
        raise _refused(first, second)
    return ct.float64 if ct.float64 in (first, second) else ct.float32


def dtype_of_number(value: bool | int | float) -> ct.DType:
    """The dtype of a Python number that meets no tile."""
    if isinstance(value, bool):
        return ct.bool_
    if isinstance(value, float):
        return ct.float32
    low, high = integer_range(ct.int32)
    return ct.int32 if low <= value <= high else ct.int64


def promote_number(dtype: ct.DType, value: bool | int | float) -> ct.DType:
    """The dtype in which cuTile mixes a tile of ``dtype`` with a Python number.

    Raises:
        TileTypeError: An integer that the tile's integer dtype cannot hold.
    """
    loose = dtype_of_number(value)
    if category(loose) > category(dtype):
        return loose
    if category(loose) == category(dtype) == INTEGER:
        low, high = integer_range(dtype)
        if not low <= value <= high:
            raise TileTypeError(f"the integer {value} is out of range of {dtype.name}")
    return dtype


def check_store(source: ct.DType | bool | int | float, target: ct.DType, what: str) -> None:
    """Refuse a store or padding value that cuTile would not cast by itself (float32 into bfloat16, for one).

    Raises:
        TileTypeError: The cast has to be written out.
    """
    if isinstance(source, (bool, int, float)):
        loose = dtype_of_number(source)
        fits = category(loose) <= category(target) and not (category(target) == BOOL and source not in (0, 1))
        if not fits:
            raise TileTypeError(f"{what}: {source!r} cannot be cast to {target.name} implicitly")
        promote_number(target, source)
        return
    if source == target:
        return
    try:
        common = promote(source, target)
    except TileTypeError:
        common = source
    if common != target:
        raise TileTypeError(f"{what}: {source.name} cannot be cast to {target.name} implicitly")


def round_to_tfloat32(data: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to the nearest (ties to even) with 10 mantissa bits."""
    bits = data.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(data), rounded.view(torch.float32), data)


def cast(data: torch.Tensor, target: ct.DType) -> torch.Tensor:
    """``data`` converted to ``target``, rounding to nearest even."""
    held = TORCH[target]
    if target == ct.tfloat32:
        return round_to_tfloat32(data.to(torch.float32))
    return data if data.dtype == held else data.to(held)


@lru_cache(maxsize=4096)
def _cached_constant(value: float, sign: float, target: ct.DType) -> torch.Tensor:
    return cast(torch.tensor(value), target)


def constant(value: bool | int | float, target: ct.DType) -> torch.Tensor | bool | int | float:
    """``value`` as an operand beside tensors of ``target``: already rounded to it.

    torch would compute ``bfloat16 + 0.1`` with 0.1 in float32; cuTile rounds 0.1 to bfloat16 first.
    """
    if target in HALVES:
        return _cached_constant(float(value), math.copysign(1.0, value), target)
    if category(target) == FLOAT:
        return float(value)
    return bool(value) if target == ct.bool_ else int(value)


def _refused(first: ct.DType, second: ct.DType) -> TileTypeError:
    return TileTypeError(f"implicit promotion of {first.name} and {second.name}")
