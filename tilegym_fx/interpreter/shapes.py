"""Making tiles, and changing their shape or dtype."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter import dtypes
from tilegym_fx.interpreter.checks import axis_in, constant_int, constant_shape, index_tuple
from tilegym_fx.interpreter.errors import OutOfBoundsError, TileTypeError
from tilegym_fx.interpreter.tile import OPS, Scalar, Tile, as_tile, binary


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    """``ct.full``."""
    known = dtypes.canonical(dtype)
    value = as_tile(fill_value)
    if value.ndim:
        raise TileTypeError(f"full with a fill value of shape {value.shape}; it takes a scalar")
    return Tile(dtypes.cast(value.data, known).expand(constant_shape(shape)).clone(), known)


def zeros(shape: Any, dtype: Any) -> Tile:
    """``ct.zeros``."""
    known = dtypes.canonical(dtype)
    return Tile(torch.zeros(constant_shape(shape), dtype=dtypes.TORCH[known]), known)


def ones(shape: Any, dtype: Any) -> Tile:
    """``ct.ones``."""
    known = dtypes.canonical(dtype)
    return Tile(torch.ones(constant_shape(shape), dtype=dtypes.TORCH[known]), known)


def arange(size: Any, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    """``ct.arange``."""
    known = dtypes.canonical(dtype)
    (length,) = constant_shape(size, "size")
    result = Tile(dtypes.cast(torch.arange(length, dtype=torch.int32), known), known)
    if not (type(step) is int and step == 1):
        result = binary(OPS["mul"], result, astype(step, known))
    if not (type(start) is int and start == 0):
        result = binary(OPS["add"], result, astype(start, known))
    return result


def astype(x: Any, dtype: Any, *, rounding_mode: Any = None) -> Any:
    """``ct.astype``: to nearest even between floats."""
    known = dtypes.canonical(dtype)
    if rounding_mode not in (None, ct.RoundingMode.RN):
        raise TileTypeError(f"astype with {rounding_mode}, which the interpreter does not know")
    if isinstance(x, Scalar) and dtypes.category(known) == dtypes.INTEGER:
        return Scalar(x.value, known)
    tile = as_tile(x)
    return tile if tile.dtype == known else Tile(dtypes.cast(tile.data, known), known)


def bitcast(x: Any, dtype: Any) -> Tile:
    """``ct.bitcast``."""
    tile, known = as_tile(x), dtypes.canonical(dtype)
    if ct.bool_ in (tile.dtype, known) or ct.tfloat32 in (tile.dtype, known):
        raise TileTypeError(f"bitcast of {tile.dtype.name} to {known.name}")
    if tile.dtype.bitwidth != known.bitwidth:
        raise TileTypeError(f"bitcast of {tile.dtype.name} to {known.name}: the widths differ")
    return Tile(tile.data.contiguous().view(dtypes.TORCH[known]), known)


def pack_to_bytes(x: Any) -> Tile:
    """``ct.pack_to_bytes``: the bytes of a tile in one row, of each element the lowest first."""
    tile = as_tile(x)
    if tile.dtype in (ct.bool_, ct.tfloat32):
        raise TileTypeError(f"pack_to_bytes of {tile.dtype.name}")
    return Tile(tile.data.contiguous().view(-1).view(torch.uint8), ct.uint8)


def unpack_from_bytes(x: Any, dtype: Any) -> Tile:
    """``ct.unpack_from_bytes``: the elements that a row of bytes holds."""
    tile, known = as_tile(x), dtypes.canonical(dtype)
    if tile.dtype != ct.uint8 or tile.ndim != 1 or known in (ct.bool_, ct.tfloat32):
        raise TileTypeError(f"unpack_from_bytes of {tile!r} to {known.name}; it takes one row of uint8")
    if 8 * len(tile.data) % known.bitwidth:
        raise TileTypeError(f"unpack_from_bytes of {tile!r} to {known.name}: the bytes are not a whole number of these")
    return Tile(tile.data.contiguous().view(dtypes.TORCH[known]), known)


def reshape(x: Any, shape: Any) -> Tile:
    """``ct.reshape``; one length may be -1."""
    tile = as_tile(x)
    lengths = tuple(constant_int(n, "shape") for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    known = math.prod(n for n in lengths if n != -1)
    if lengths.count(-1) == 1 and known and tile.data.numel() % known == 0:
        lengths = tuple(tile.data.numel() // known if n == -1 else n for n in lengths)
    if math.prod(lengths) != tile.data.numel() or any(n < 1 for n in lengths):
        raise TileTypeError(f"reshape of {tile!r} to {lengths}")
    return Tile(tile.data.reshape(lengths), tile.dtype)


def item(x: Any) -> Tile:
    """``Tile.item``: a tile of one element as a 0-d tile."""
    return reshape(x, ())


def broadcast_to(x: Any, shape: Any) -> Tile:
    """``ct.broadcast_to``."""
    tile, wanted = as_tile(x), constant_shape(shape)
    try:
        return Tile(tile.data.expand(wanted), tile.dtype)
    except RuntimeError as problem:
        raise TileTypeError(f"broadcast of {tile!r} to {wanted}") from problem


def expand_dims(x: Any, axis: Any) -> Tile:
    """``ct.expand_dims``."""
    tile = as_tile(x)
    return Tile(tile.data.unsqueeze(axis_in(axis, tile.ndim + 1)), tile.dtype)


def permute(x: Any, axes: Any) -> Tile:
    """``ct.permute``."""
    tile = as_tile(x)
    order = tuple(axis_in(axis, tile.ndim) for axis in axes)
    if sorted(order) != list(range(tile.ndim)):
        raise TileTypeError(f"permute of {tile!r} with {axes!r}, which is no permutation of its axes")
    return Tile(tile.data.permute(order), tile.dtype)


def transpose(x: Any, axis0: Any = None, axis1: Any = None) -> Tile:
    """``ct.transpose``; a 2-d tile needs no axes."""
    tile = as_tile(x)
    if axis0 is None and axis1 is None and tile.ndim == 2:
        axis0, axis1 = 0, 1
    if axis0 is None or axis1 is None or tile.ndim < 2:
        raise TileTypeError(f"transpose of {tile!r} with axes {axis0!r} and {axis1!r}")
    return Tile(tile.data.transpose(axis_in(axis0, tile.ndim), axis_in(axis1, tile.ndim)), tile.dtype)


def cat(tiles: Any, axis: Any) -> Tile:
    """``ct.cat`` of one or two tiles; the result's lengths must be powers of two."""
    parts = [as_tile(tile) for tile in tiles]
    if not 1 <= len(parts) <= 2:
        raise TileTypeError(f"cat of {len(parts)} tiles; it takes two")
    first = parts[0]
    a = axis_in(axis, first.ndim)
    for part in parts[1:]:
        same = part.ndim == first.ndim and all(
            n == m for d, (n, m) in enumerate(zip(part.shape, first.shape, strict=True)) if d != a
        )
        if part.dtype != first.dtype or not same:
            raise TileTypeError(f"cat of {first!r} and {part!r}, whose dtype, rank or other lengths differ")
    data = torch.cat([part.data for part in parts], dim=a)
    constant_shape(tuple(data.shape), "the result of cat")
    return Tile(data, first.dtype)


def _subtile(tile: Tile, index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    if len(shape) != tile.ndim:
        raise TileTypeError(f"a part of shape {shape} of {tile!r}: the ranks differ")
    slices = []
    for place, size, length in zip(index_tuple(index, tile.ndim, tile), shape, tile.shape, strict=True):
        if length % size:
            raise TileTypeError(f"{tile!r} does not divide into parts of shape {shape}")
        if not 0 <= place < length // size:
            raise OutOfBoundsError(f"part {index!r} of {tile!r} in parts of shape {shape}")
        slices.append(slice(place * size, (place + 1) * size))
    return tuple(slices)


def extract(x: Any, index: Any, shape: Any) -> Tile:
    """``ct.extract``: ``index`` counts parts of ``shape``, not elements."""
    tile, wanted = as_tile(x), constant_shape(shape)
    part = tile.data[_subtile(tile, index, wanted or (1,) * tile.ndim)]
    return Tile(part if wanted else part.reshape(()), tile.dtype)


def insert(x: Any, index: Any, value: Any) -> Tile:
    """``ct.insert``: a new tile with one part replaced."""
    tile, part = as_tile(x), as_tile(value)
    if tile.dtype != part.dtype:
        raise TileTypeError(f"insert of {part.dtype.name} into {tile.dtype.name}")
    data = tile.data.clone()
    data[_subtile(tile, index, part.shape or (1,) * tile.ndim)] = part.data
    return Tile(data, tile.dtype)


def subscript(tile: Tile, key: Any) -> Tile:
    """``tile[:, None]``: new axes of length one; nothing else may be indexed.

    Raises:
        TileTypeError: The key holds an index.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if any(not (k is None or k is Ellipsis or (isinstance(k, slice) and k == slice(None))) for k in keys):
        raise TileTypeError(f"{tile!r} indexed with {key!r}; tiles take None, `...` and `:` only, else use ct.extract")
    if keys.count(Ellipsis) > 1 or sum(isinstance(k, slice) for k in keys) > tile.ndim:
        raise TileTypeError(f"{tile!r} indexed with {key!r}: too many axes")
    return Tile(tile.data[keys], tile.dtype)


for _name, _function in {
    "__getitem__": subscript,
    "astype": astype,
    "extract": extract,
    "insert": insert,
    "item": item,
    "permute": permute,
    "reshape": reshape,
    "transpose": transpose,
}.items():
    if hasattr(ct.Tile, _name):
        setattr(Tile, _name, _function)
for _name in ("astype", "item", "reshape"):
    setattr(Scalar, _name, globals()[_name])
