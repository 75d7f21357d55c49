"""Kernel arguments and every way to read and write them, with the bounds that cuTile leaves unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter import dtypes
from tilegym_fx.interpreter.checks import axis_in, constant_shape, index_tuple, index_value
from tilegym_fx.interpreter.errors import InterpreterError, OutOfBoundsError, TileTypeError
from tilegym_fx.interpreter.tile import Scalar, Tile, as_tile

_PADDING: dict[ct.PaddingMode, float] = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: float("nan"),
    ct.PaddingMode.POS_INF: float("inf"),
    ct.PaddingMode.NEG_INF: float("-inf"),
}


class Array:
    """A tensor argument as the kernel sees it: a view of the caller's memory.

    Args:
        tensor: The caller's CPU tensor.
        static_shape: Dimensions whose length is a compile-time constant.
        static_strides: Dimensions whose stride is a compile-time constant.
        index_dtype: Dtype of lengths and strides.

    Raises:
        TileTypeError: A dtype that the interpreter does not know.
        InterpreterError: The tensor is not in CPU memory.
    """

    __slots__ = ("dtype", "index_dtype", "ndim", "shape", "strides", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        static_shape: Sequence[int] = (),
        static_strides: Sequence[int] = (),
        index_dtype: ct.DType = ct.int32,
    ) -> None:
        if tensor.device.type != "cpu":
            raise InterpreterError(
                f"a tensor on {tensor.device} among the arguments of an interpreted kernel",
                advice="Put every tensor on the CPU, or every tensor on one GPU",
            )
        if tensor.dtype not in dtypes.OF_TORCH:
            raise TileTypeError(f"an array of {tensor.dtype}, which the interpreter does not know")
        self.tensor = tensor.detach()
        self.dtype = dtypes.OF_TORCH[tensor.dtype]
        self.ndim = tensor.ndim
        self.index_dtype = index_dtype
        fixed_shape = {d % tensor.ndim for d in static_shape}
        fixed_strides = {d % tensor.ndim for d in static_strides}
        self.shape = tuple(n if d in fixed_shape else Scalar(n, index_dtype) for d, n in enumerate(tensor.shape))
        self.strides = tuple(n if d in fixed_strides else Scalar(n, index_dtype) for d, n in enumerate(tensor.stride()))

    def __repr__(self) -> str:
        return f"Array({self.dtype.name}{list(self.tensor.shape)})"

    def __getitem__(self, key: object) -> None:
        raise TileTypeError("arrays are not subscriptable; use ct.load or ct.gather")

    def __setitem__(self, key: object, value: object) -> None:
        raise TileTypeError("arrays take no item assignment; use ct.store or ct.scatter")

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        """The part of the array between two indices along one axis, sharing its memory.

        Raises:
            OutOfBoundsError: The bounds are not within the axis.
        """
        axis = axis_in(axis, self.ndim)
        first, last, length = index_value(start), index_value(stop), self.tensor.shape[axis]
        if not (0 <= first <= last <= length):
            raise OutOfBoundsError(f"slice {first}:{last} of an axis of length {length}")
        return Array(self.tensor.narrow(axis, first, last - first), index_dtype=self.index_dtype)

    def tiled_view(
        self,
        tile_shape: Any,
        *,
        padding_mode: ct.PaddingMode = ct.PaddingMode.UNDETERMINED,
        traversal_steps: Any = None,
    ) -> TiledView:
        """A view that loads and stores tiles of one shape.

        Raises:
            TileTypeError: ``traversal_steps`` is given: overlapping views are not interpreted.
        """
        if traversal_steps is not None:
            raise TileTypeError("tiled_view with traversal_steps, which the interpreter does not know")
        return TiledView(self, constant_shape(tile_shape), padding_mode)


class TiledView:
    """What :meth:`Array.tiled_view` returns."""

    def __init__(self, array: Array, tile_shape: tuple[int, ...], padding_mode: ct.PaddingMode) -> None:
        self.array = array
        self.tile_shape = tile_shape
        self.padding_mode = padding_mode
        self.dtype = array.dtype

    def num_tiles(self, axis: int) -> Scalar:
        return num_tiles(self.array, axis, self.tile_shape)

    def load(self, index: Any, **hints: Any) -> Tile:
        return load(self.array, index, self.tile_shape, padding_mode=self.padding_mode, **hints)

    def store(self, index: Any, tile: Any, **hints: Any) -> None:
        tile = as_tile(tile)
        store(self.array, index, Tile(tile.data.expand(self.tile_shape), tile.dtype), **hints)


def _axis_order(order: Any, rank: int) -> tuple[int, ...] | None:
    """The permutation that ``order`` stands for, or None when it changes nothing."""
    if order == "C":
        return None
    if order == "F":
        return tuple(range(rank - 1, -1, -1))
    axes = tuple(axis_in(axis, rank) for axis in order)
    if sorted(axes) != list(range(rank)):
        raise TileTypeError(f"order {order!r} is no permutation of {rank} axes")
    return axes


def _check_hints(latency: Any, allow_tma: Any = None) -> None:
    if latency is not None and not (type(latency) is int and 1 <= latency <= 10):
        raise TileTypeError(f"latency must be a constant from 1 to 10, but is {latency!r}")
    if allow_tma not in (None, True, False):
        raise TileTypeError(f"allow_tma must be a constant bool, but is {allow_tma!r}")


def _window(
    array: Array, index: Any, shape: tuple[int, ...], order: Any, what: str
) -> tuple[torch.Tensor, list[slice], list[int], bool]:
    """The permuted tensor, the slices a tile covers in it, their lengths, and whether all of it is inside."""
    view = array.tensor
    axes = _axis_order(order, array.ndim)
    if axes is not None:
        view = view.permute(axes)
    slices, lengths, inside = [], [], True
    places = index_tuple(index, array.ndim, array)
    for place, size, length in zip(places, shape, view.shape, strict=True):
        start = place * size
        if start < 0 or start >= length:
            raise OutOfBoundsError(
                f"{what} a tile of shape {shape} at {tuple(places)}{f' in order {order!r}' if axes else ''}"
                f" lies wholly outside {array!r}"
            )
        stop = start + size
        if stop > length:
            stop, inside = length, False
        slices.append(slice(start, stop))
        lengths.append(stop - start)
    return view, slices, lengths, inside


def load(
    array: Array,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: ct.PaddingMode = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """``ct.load``.

    Raises:
        OutOfBoundsError: The tile lies outside, or crosses the edge with no padding.
    """
    _require_array(array, "load")
    _check_hints(latency, allow_tma)
    wanted = constant_shape(shape)
    full = wanted or (1,) * array.ndim
    if len(full) != array.ndim:
        raise TileTypeError(f"load of a tile of shape {wanted} from {array!r}: the ranks differ")
    view, slices, lengths, inside = _window(array, index, full, order, "load of")
    part = view[tuple(slices)]
    if inside:
        data = part.clone(memory_format=torch.contiguous_format)
    else:
        if padding_mode is ct.PaddingMode.UNDETERMINED or not check_bounds:
            raise OutOfBoundsError(
                f"load of a tile of shape {full} at {index!r} crosses the edge of {array!r} with no padding",
                advice="Pass padding_mode=ct.PaddingMode.ZERO, or use a smaller tile",
            )
        data = _padded(part, full, lengths, array.dtype, padding_mode)
    return Tile(data if wanted else data.reshape(()), array.dtype)


def _padded(
    part: torch.Tensor, shape: tuple[int, ...], lengths: list[int], dtype: ct.DType, mode: ct.PaddingMode
) -> torch.Tensor:
    if mode not in _PADDING:
        raise TileTypeError(f"padding_mode {mode!r}")
    if mode is not ct.PaddingMode.ZERO and dtypes.category(dtype) != dtypes.FLOAT:
        raise TileTypeError(f"padding of {dtype.name} with {mode.name}")
    data = part.new_full(shape, _PADDING[mode])
    data[tuple(slice(0, n) for n in lengths)] = part
    return data


def store(
    array: Array,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> None:
    """``ct.store``: what of the tile lies beyond the edge is dropped.

    Raises:
        OutOfBoundsError: The whole tile lies outside, or part of it with ``check_bounds=False``.
        TileTypeError: The tile's dtype needs an explicit cast.
    """
    _require_array(array, "store")
    _check_hints(latency, allow_tma)
    data = stored(tile, array, "the stored tile")
    if data.ndim == 0:
        data = data.reshape((1,) * array.ndim)
    shape = tuple(data.shape)
    if len(shape) != array.ndim:
        raise TileTypeError(f"store of a tile of shape {shape} into {array!r}: the ranks differ")
    view, slices, lengths, inside = _window(array, index, shape, order, "store of")
    if not inside:
        if not check_bounds:
            raise OutOfBoundsError(f"store of a tile of shape {shape} at {index!r} crosses the edge of {array!r}")
        data = data[tuple(slice(0, n) for n in lengths)]
    view[tuple(slices)] = data


def stored(value: Any, array: Array, what: str) -> torch.Tensor:
    """``value`` in the array's dtype, where cuTile would cast it by itself."""
    source = value.dtype if isinstance(value, Tile | Scalar) else value
    dtypes.check_store(source, array.dtype, what)
    return dtypes.cast(as_tile(value).data, array.dtype)


def num_tiles(array: Array, axis: Any, shape: Any, order: Any = "C") -> Scalar:
    """``ct.num_tiles``."""
    _require_array(array, "num_tiles")
    axis = axis_in(axis, array.ndim)
    size = constant_shape(shape)[axis]
    axes = _axis_order(order, array.ndim)
    length = array.tensor.shape[axes[axis] if axes else axis]
    return Scalar(-(-length // size))


def places_of(
    array: Array, indices: Any, mask: Any, check_bounds: bool, what: str
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Index tensors of one shape and a bool tensor that says where memory is touched."""
    _require_array(array, what)
    items = indices if isinstance(indices, (tuple, list)) else (indices,)
    if len(items) != array.ndim:
        raise TileTypeError(f"{what} with {len(items)} indices for {array!r}")
    tiles = [as_tile(item) for item in items]
    for tile in tiles:
        if dtypes.category(tile.dtype) != dtypes.INTEGER:
            raise TileTypeError(f"{what} with an index of {tile.dtype.name}")
    parts = torch.broadcast_tensors(*(tile.data.long() for tile in tiles))
    lengths = array.tensor.shape
    inside = torch.ones(parts[0].shape, dtype=torch.bool)
    for part, length in zip(parts, lengths, strict=True):
        inside = inside & (part >= 0) & (part < length)
    wanted = torch.ones_like(inside) if mask is None else _mask(mask, inside.shape, what)
    if not check_bounds and bool((wanted & ~inside).any()):
        raise OutOfBoundsError(f"{what} with check_bounds=False touches places outside {array!r}")
    active = inside & wanted
    return tuple(torch.where(active, part, 0) for part in parts), active


def _mask(mask: Any, shape: torch.Size, what: str) -> torch.Tensor:
    tile = as_tile(mask)
    if tile.dtype != ct.bool_:
        raise TileTypeError(f"{what} with a mask of {tile.dtype.name}; it must be bool")
    return expanded(tile.data, shape, f"{what}: the mask")


def expanded(data: torch.Tensor, shape: torch.Size, what: str) -> torch.Tensor:
    try:
        return data.expand(shape)
    except RuntimeError as problem:
        raise TileTypeError(f"{what} of shape {tuple(data.shape)} does not broadcast to {tuple(shape)}") from problem


def gather(
    array: Array,
    indices: Any,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    """``ct.gather``: the padding value where the mask is False or the index is out of bounds.

    Raises:
        OutOfBoundsError: ``check_bounds=False`` and an unmasked index is out of bounds.
    """
    _check_hints(latency)
    places, active = places_of(array, indices, mask, check_bounds, "gather")
    padding = expanded(stored(padding_value, array, "the padding value"), active.shape, "gather: the padding value")
    if not active.any():
        return Tile(padding.clone(), array.dtype)
    return Tile(torch.where(active, array.tensor[places], padding), array.dtype)


def scatter(
    array: Array,
    indices: Any,
    value: Any,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    """``ct.scatter``: nothing is written where the mask is False or the index is out of bounds.

    Raises:
        OutOfBoundsError: ``check_bounds=False`` and an unmasked index is out of bounds.
    """
    _check_hints(latency)
    places, active = places_of(array, indices, mask, check_bounds, "scatter")
    data = expanded(stored(value, array, "the stored value"), active.shape, "scatter: the value")
    array.tensor[tuple(place[active] for place in places)] = data[active]


def _require_array(array: object, what: str) -> None:
    if not isinstance(array, Array):
        raise TileTypeError(f"{what} takes an array argument of the kernel, but got {array!r}")
