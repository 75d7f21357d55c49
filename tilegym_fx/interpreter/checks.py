"""Checks on the arguments of operations: constants, axes and indices."""

from __future__ import annotations

from typing import Any

from tilegym_fx.interpreter import dtypes
from tilegym_fx.interpreter.errors import TileTypeError
from tilegym_fx.interpreter.tile import Scalar, Tile


def constant_int(value: Any, what: str) -> int:
    """``value``, which must be known when the kernel is compiled.

    Raises:
        TileTypeError: It is a runtime value, or no integer.
    """
    if type(value) is int:
        return value
    raise TileTypeError(f"{what} must be a compile-time constant integer (ct.Constant[int]), but is {value!r}")


def constant_shape(shape: Any, what: str = "shape") -> tuple[int, ...]:
    """A tile shape: constants, each a power of two.

    Raises:
        TileTypeError: It is not.
    """
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    for length in lengths:
        if type(length) is not int:
            constant_int(length, what)
        if length <= 0 or length & (length - 1):
            raise TileTypeError(f"the length {length} in {what} {lengths} is not a positive power of two")
    return lengths


def axis_in(axis: Any, ndim: int) -> int:
    """``axis`` counted from the front.

    Raises:
        TileTypeError: It is no constant, or out of range.
    """
    axis = constant_int(axis, "axis")
    if not -ndim <= axis < ndim:
        raise TileTypeError(f"axis {axis} of a value with {ndim} dimension(s)")
    return axis % ndim


def index_value(value: Any) -> int:
    """The Python integer behind a constant, a scalar or a 0-d integer tile.

    Raises:
        TileTypeError: It is none of these.
    """
    if type(value) is int:
        return value
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, Tile) and value.ndim == 0 and dtypes.category(value.dtype) == dtypes.INTEGER:
        return int(value.data)
    raise TileTypeError(f"expected an integer scalar as index, but got {value!r}")


def index_tuple(index: Any, rank: int, what: object) -> list[int]:
    """An index in tile space, one integer for each dimension.

    Raises:
        TileTypeError: Wrong number of indices, or no integers.
    """
    items = index if isinstance(index, (tuple, list)) else (index,)
    if len(items) != rank:
        raise TileTypeError(f"{len(items)} indices for {what!r} of rank {rank}")
    return [index_value(item) for item in items]
