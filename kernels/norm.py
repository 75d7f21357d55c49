"""RMSNorm and LayerNorm, alone and fused with the residual add before or after, in cuTile.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
    LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias

What differs between model families is where the result is rounded: the constant ROUNDING below.

Tiles. Arrays are read as [outer, inner, hidden]. That covers plain rows (inner = 1) and, without a copy,
strided views such as the query heads inside a packed qkv projection (outer = tokens, inner = heads). A block
owns OUTER x INNER whole rows and holds them in registers as chunks of CHUNK columns, so memory is read once
and written once; a power of two that covers 4544 columns would idle almost half of its lanes, five chunks of
1024 idle a ninth. Rows longer than MAX_HELD columns do not fit and are read again for every pass.

Loads. A chunk that lies inside its array is loaded without a bounds check (this needs CTK 13.4); one that
does not is gathered under a mask. A checked tile load compiles to a branch with its use inside, so that each
load waits for the one before: 704 instructions instead of 264 at 4096 columns, and one load in flight
instead of eight (disassembly for sm_90). The bulk-copy engine stays off (allow_tma=False): rows go straight
to registers in 16-byte loads, which takes 62 registers a thread at 4096 columns instead of 255 and a
shared-memory round trip.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import prod

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

CAST_FIRST = 0  # weight * norm.to(x.dtype)
CAST_LAST = 1  # (weight * norm).to(x.dtype), the product in float32
PLUS_ONE = 2  # (norm * (1 + weight)).to(x.dtype), sum and product in float32

#: Longest row held in registers: 128 values for each of a block's 128 threads.
MAX_HELD = 16384
#: Columns of a chunk: one 16-byte load for each of 128 threads, in a 2-byte dtype.
FULL_CHUNK = 1024
#: Columns of a chunk of a longer row: four loads in flight for each thread.
LONG_CHUNK = 4096
#: Elements of a block when there are many short rows: two 16-byte loads for each thread.
BLOCK_ELEMENTS = 2048
#: Blocks that fill a large GPU twice over; a block takes several rows only when this many are left.
FILL_BLOCKS = 264

Int = ct.Constant[int]
Flag = ct.Constant[bool]


def get(array, outer, inner, k, shape, whole):
    """Chunk k of the block's rows; what lies outside of the array reads as zero."""
    if whole:
        return ct.load(array, (outer, inner, k), shape=shape, check_bounds=False, allow_tma=False)
    first = ct.reshape(outer * shape[0] + ct.arange(shape[0], dtype=ct.int32), (shape[0], 1, 1))
    second = ct.reshape(inner * shape[1] + ct.arange(shape[1], dtype=ct.int32), (1, shape[1], 1))
    columns = ct.reshape(k * shape[2] + ct.arange(shape[2], dtype=ct.int32), (1, 1, shape[2]))
    return ct.gather(array, (first, second, columns))


def get_sum(sources, outer, inner, k, shape, whole, dtype):
    """Chunk k of what is normed: x, or residual + x rounded to `dtype` as the separate addition rounds it."""
    tile = get(sources[0], outer, inner, k, shape, whole)
    if len(sources) == 1:
        return tile
    residual = get(sources[1], outer, inner, k, shape, whole)
    if residual.dtype == tile.dtype:
        return residual + tile
    return ct.astype(ct.astype(residual, ct.float32) + ct.astype(tile, ct.float32), dtype)


def get_vector(vector, k, width, whole):
    """Chunk k of a weight or bias, to be broadcast over the rows."""
    if whole:
        tile = ct.load(vector, (k,), shape=(width,), check_bounds=False, allow_tma=False)
    else:
        tile = ct.gather(vector, k * width + ct.arange(width, dtype=ct.int32))
    return ct.reshape(tile, (1, 1, width))


def put(array, outer, inner, k, tile, whole):
    """Writes chunk k of the block's rows in the array's dtype; what lies outside of the array is dropped."""
    if whole:
        ct.store(array, (outer, inner, k), ct.astype(tile, array.dtype), check_bounds=False, allow_tma=False)
    else:
        ct.store(array, (outer, inner, k), ct.astype(tile, array.dtype), allow_tma=False)


def put_sum(sums, outer, inner, k, tile, whole):
    if len(sums) == 1:
        put(sums[0], outer, inner, k, tile, whole)


def put_norm(out, kept, outer, inner, k, norm, dtype, rounding, whole):
    """Writes chunk k of the norm, or of residual + norm, the norm rounded to the dtype it has on its own."""
    if len(kept) == 1:
        if rounding != CAST_FIRST:
            norm = ct.astype(norm, dtype)
        residual = get(kept[0], outer, inner, k, norm.shape, whole)
        if norm.dtype != residual.dtype or norm.dtype != ct.bfloat16:
            residual, norm = ct.astype(residual, ct.float32), ct.astype(norm, ct.float32)
        norm = residual + norm
    put(out, outer, inner, k, norm, whole)


def squares(tile):
    wide = ct.astype(tile, ct.float32)
    return wide * wide


def row_mean(total, hidden):
    """Mean of every row. Chunks were added up lane by lane before, so one reduction across lanes is left."""
    return ct.sum(total, axis=2, keepdims=True) * (1.0 / hidden)


def inverse_root_mean(total, hidden, eps):
    return ct.rsqrt(row_mean(total, hidden) + eps)


def scaled(tile, scale, weight, k, whole, rounding):
    """Chunk k of the RMS norm times its weight; the last cast of CAST_LAST and PLUS_ONE is the caller's."""
    factor = get_vector(weight, k, tile.shape[2], whole)
    norm = ct.astype(tile, ct.float32) * scale
    if rounding == CAST_FIRST and weight.dtype == tile.dtype:
        return ct.astype(norm, tile.dtype) * factor
    if rounding == CAST_FIRST:
        norm = ct.astype(ct.astype(norm, tile.dtype), ct.float32)
    factor = ct.astype(factor, ct.float32)
    if rounding == PLUS_ONE:
        factor = factor + 1.0
    return norm * factor


def rms_norm_rows(sources, sums, kept, weight, out, eps, rounding, hidden, shape, rows_fit):
    """Norms the block's rows of `sources`; writes their sum to `sums` and adds `kept`, if there are any."""
    outer, inner, chunk = ct.bid(0), ct.bid(1), shape[2]
    dtype = sums[0].dtype if len(sums) == 1 else sources[0].dtype
    total = ct.zeros(shape, ct.float32)
    if hidden <= MAX_HELD:
        row = ()
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            row += (get_sum(sources, outer, inner, k, shape, rows_fit and (k + 1) * chunk <= hidden, dtype),)
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            put_sum(sums, outer, inner, k, row[k], rows_fit and (k + 1) * chunk <= hidden)
            total = total + squares(row[k])
        scale = inverse_root_mean(total, hidden, eps)
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            whole = (k + 1) * chunk <= hidden
            norm = scaled(row[k], scale, weight, k, whole, rounding)
            put_norm(out, kept, outer, inner, k, norm, dtype, rounding, rows_fit and whole)
    else:
        whole = hidden % chunk == 0
        fits = rows_fit and whole
        for k in range(ct.cdiv(hidden, chunk)):
            tile = get_sum(sources, outer, inner, k, shape, fits, dtype)
            put_sum(sums, outer, inner, k, tile, fits)
            total = total + squares(tile)
        scale = inverse_root_mean(total, hidden, eps)
        for k in range(ct.cdiv(hidden, chunk)):
            norm = scaled(get_sum(sources, outer, inner, k, shape, fits, dtype), scale, weight, k, whole, rounding)
            put_norm(out, kept, outer, inner, k, norm, dtype, rounding, fits)


@ct.kernel
def rms_norm_kernel(
    x, weight, out, eps, ROUNDING: Int, HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    rms_norm_rows((x,), (), (), weight, out, eps, ROUNDING, HIDDEN, (OUTER, INNER, CHUNK), ROWS_FIT)


@ct.kernel
def add_rms_norm_kernel(
    x, residual, weight, out, residual_out, eps,
    ROUNDING: Int, HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    shape = (OUTER, INNER, CHUNK)
    rms_norm_rows((x, residual), (residual_out,), (), weight, out, eps, ROUNDING, HIDDEN, shape, ROWS_FIT)


@ct.kernel
def rms_norm_add_kernel(
    x, residual, weight, out, eps,
    ROUNDING: Int, HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    rms_norm_rows((x,), (), (residual,), weight, out, eps, ROUNDING, HIDDEN, (OUTER, INNER, CHUNK), ROWS_FIT)


def from_mean(tile, mean, k, whole, hidden):
    """Distance from the mean; zero beyond the end of the row, where it would add mean^2 to the variance."""
    width = tile.shape[2]
    distance = ct.astype(tile, ct.float32) - mean
    if whole:
        return distance
    columns = ct.reshape(k * width + ct.arange(width, dtype=ct.int32), (1, 1, width))
    return ct.where(columns < hidden, distance, 0.0)


def affine(tile, mean, scale, weight, bias, k, whole):
    """Chunk k of the LayerNorm, in float32; rounded once, when it is written."""
    factor = ct.astype(get_vector(weight, k, tile.shape[2], whole), ct.float32)
    offset = ct.astype(get_vector(bias, k, tile.shape[2], whole), ct.float32)
    return (ct.astype(tile, ct.float32) - mean) * scale * factor + offset


def layer_norm_rows(sources, sums, weight, bias, out, eps, hidden, shape, rows_fit):
    """The block's rows: norms `sources` and writes their sum to `sums` if there is one."""
    outer, inner, chunk = ct.bid(0), ct.bid(1), shape[2]
    dtype = sums[0].dtype if len(sums) == 1 else sources[0].dtype
    total, spread = ct.zeros(shape, ct.float32), ct.zeros(shape, ct.float32)
    if hidden <= MAX_HELD:
        row = ()
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            row += (get_sum(sources, outer, inner, k, shape, rows_fit and (k + 1) * chunk <= hidden, dtype),)
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            put_sum(sums, outer, inner, k, row[k], rows_fit and (k + 1) * chunk <= hidden)
            total = total + ct.astype(row[k], ct.float32)
        mean = row_mean(total, hidden)
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            spread = spread + squares(from_mean(row[k], mean, k, (k + 1) * chunk <= hidden, hidden))
        scale = inverse_root_mean(spread, hidden, eps)
        for k in ct.static_iter(range(ct.cdiv(hidden, chunk))):
            whole = (k + 1) * chunk <= hidden
            put(out, outer, inner, k, affine(row[k], mean, scale, weight, bias, k, whole), rows_fit and whole)
    else:
        whole = hidden % chunk == 0
        fits = rows_fit and whole
        for k in range(ct.cdiv(hidden, chunk)):
            tile = get_sum(sources, outer, inner, k, shape, fits, dtype)
            put_sum(sums, outer, inner, k, tile, fits)
            total = total + ct.astype(tile, ct.float32)
        mean = row_mean(total, hidden)
        for k in range(ct.cdiv(hidden, chunk)):
            tile = get_sum(sources, outer, inner, k, shape, fits, dtype)
            spread = spread + squares(from_mean(tile, mean, k, whole, hidden))
        scale = inverse_root_mean(spread, hidden, eps)
        for k in range(ct.cdiv(hidden, chunk)):
            tile = get_sum(sources, outer, inner, k, shape, fits, dtype)
            put(out, outer, inner, k, affine(tile, mean, scale, weight, bias, k, whole), fits)


@ct.kernel
def layer_norm_kernel(
    x, weight, bias, out, eps, HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    layer_norm_rows((x,), (), weight, bias, out, eps, HIDDEN, (OUTER, INNER, CHUNK), ROWS_FIT)


@ct.kernel
def add_layer_norm_kernel(
    x, residual, weight, bias, out, residual_out, eps,
    HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    shape = (OUTER, INNER, CHUNK)
    layer_norm_rows((x, residual), (residual_out,), weight, bias, out, eps, HIDDEN, shape, ROWS_FIT)


@lru_cache(maxsize=4096)
def pick_tiles(outer: int, inner: int, hidden: int, elements: int = BLOCK_ELEMENTS) -> tuple[int, int, int, bool]:
    """Chooses the tile of a [outer, inner, hidden] array: OUTER, INNER, CHUNK and ROWS_FIT.

    Rows of 1024 columns and more get a block each: 128 threads with one 16-byte load a chunk, all chunks in
    flight at once. Shorter rows share a block, so that its threads have as much to load, unless there are so
    few that multiprocessors would run dry; their CHUNK is the largest power of two that idles at most a fifth
    of the lanes. A layer norm asks for twice the elements: 768 columns took 16.0 us with four rows, 14.7 with eight.
    """
    if hidden >= FULL_CHUNK:
        chunk = FULL_CHUNK if hidden <= MAX_HELD else LONG_CHUNK
        return 1, 1, chunk, True
    chunk = FULL_CHUNK
    while -(-hidden // chunk) * chunk * 4 > hidden * 5 and chunk > 16:
        chunk //= 2

    def enough_for(share: int) -> bool:
        return outer * inner >= share * FILL_BLOCKS

    rows = 1
    while (rows * hidden < elements or rows * chunk < FULL_CHUNK) and enough_for(2 * rows):
        rows *= 2
    per_inner = 1
    while per_inner < rows and inner % (2 * per_inner) == 0:
        per_inner *= 2
    per_outer = rows // per_inner
    return per_outer, per_inner, chunk, outer % per_outer == 0


def as_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views tensors of one shape as [outer, inner, hidden] arrays; copies what strides cannot express."""
    shape = tensors[0].shape
    hidden = shape[-1]
    if all(tensor.is_contiguous() for tensor in tensors):
        outer = -1 if hidden else prod(shape[:-1])  # rows without columns could be any number
        return [tensor.view(outer, 1, hidden) for tensor in tensors]
    for cut in range(len(shape) - 1, -1, -1):
        if all(_merges(tensor, 0, cut) and _merges(tensor, cut, len(shape) - 1) for tensor in tensors):
            split = prod(shape[:cut]), prod(shape[cut:-1]), hidden
            return [tensor.view(split) for tensor in tensors]
    return [tensor.contiguous().view(-1, 1, hidden) for tensor in tensors]


def _merges(tensor: torch.Tensor, first: int, last: int) -> bool:
    """Whether dimensions `first` up to `last` lie in memory like one dimension."""
    sizes, strides = tensor.shape, tensor.stride()
    kept = [dim for dim in range(first, last) if sizes[dim] != 1]
    return all(strides[a] == strides[b] * sizes[b] for a, b in pairwise(kept))


def _plan(
    *tensors: torch.Tensor, elements: int = BLOCK_ELEMENTS
) -> tuple[list[torch.Tensor], tuple[int, int], tuple[int, int, int, int, bool]]:
    rows = as_rows(*tensors)
    outer, inner, hidden = rows[0].shape
    tile = pick_tiles(outer, inner, hidden, elements)
    return rows, (-(-outer // tile[0]), -(-inner // tile[1])), (hidden, *tile)


def _promoted(left: torch.Tensor, right: torch.Tensor) -> torch.dtype:
    return left.dtype if left.dtype == right.dtype else torch.promote_types(left.dtype, right.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: int) -> torch.Tensor:
    (rows,), grid, tile = _plan(x)
    out = torch.empty(x.shape, dtype=_promoted(x, weight) if rounding == CAST_FIRST else x.dtype, device=x.device)
    if out.numel():
        launch(rms_norm_kernel, grid, (rows, weight, out.view(rows.shape), eps, rounding, *tile))
    return out


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, kept), grid, tile = _plan(x, residual)
    residual_out = torch.empty(x.shape, dtype=_promoted(x, residual), device=x.device)
    dtype = _promoted(residual_out, weight) if rounding == CAST_FIRST else residual_out.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        results = out.view(rows.shape), residual_out.view(rows.shape)
        launch(add_rms_norm_kernel, grid, (rows, kept, weight, *results, eps, rounding, *tile))
    return out, residual_out


def _norm_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: int) -> torch.Tensor:
    (rows, kept), grid, tile = _plan(x, residual)
    dtype = _promoted(x, weight) if rounding == CAST_FIRST else x.dtype
    if dtype != residual.dtype:
        dtype = torch.promote_types(dtype, residual.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        launch(rms_norm_add_kernel, grid, (rows, kept, weight, out.view(rows.shape), eps, rounding, *tile))
    return out


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(hidden_states), the norm rounded to the dtype of `hidden_states` before the product.

    Args:
        hidden_states: [..., hidden], any strides, float32, float16 or bfloat16.
        weight: [hidden], any of these dtypes; the result has the promoted dtype.
        eps: added to the mean square.
    """
    return _norm(hidden_states, weight, eps, CAST_FIRST)


def rms_norm_cast_last(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(hidden_states) in float32, rounded once; arguments as for `rms_norm`."""
    return _norm(hidden_states, weight, eps, CAST_LAST)


def rms_norm_plus_one(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(1 + weight) * norm(hidden_states) in float32, rounded once; arguments as for `rms_norm`."""
    return _norm(hidden_states, weight, eps, PLUS_ONE)


def add_rms_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of residual + hidden_states, and that sum; both have the shape of `hidden_states`."""
    return _add_norm(hidden_states, residual, weight, eps, CAST_FIRST)


def add_rms_norm_cast_last(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_cast_last` of residual + hidden_states, and that sum."""
    return _add_norm(hidden_states, residual, weight, eps, CAST_LAST)


def add_rms_norm_plus_one(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_plus_one` of residual + hidden_states, and that sum."""
    return _add_norm(hidden_states, residual, weight, eps, PLUS_ONE)


def rms_norm_add(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual + `rms_norm` of hidden_states, both of one shape."""
    return _norm_add(hidden_states, residual, weight, eps, CAST_FIRST)


def rms_norm_cast_last_add(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual + `rms_norm_cast_last` of hidden_states, both of one shape."""
    return _norm_add(hidden_states, residual, weight, eps, CAST_LAST)


def rms_norm_plus_one_add(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual + `rms_norm_plus_one` of hidden_states, both of one shape."""
    return _norm_add(hidden_states, residual, weight, eps, PLUS_ONE)


def layer_norm(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension, computed in float32 and rounded once.

    Args:
        hidden_states: [..., hidden], any strides, float32, float16 or bfloat16; the result has this dtype.
        weight: [hidden], any of these dtypes.
        bias: [hidden], any of these dtypes.
        eps: added to the variance.
    """
    (rows,), grid, tile = _plan(hidden_states, elements=2 * BLOCK_ELEMENTS)
    out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    if out.numel():
        launch(layer_norm_kernel, grid, (rows, weight, bias, out.view(rows.shape), eps, *tile))
    return out


def add_layer_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of residual + hidden_states, and that sum; both have the shape of `hidden_states`."""
    (rows, kept), grid, tile = _plan(hidden_states, residual)
    dtype = _promoted(hidden_states, residual)
    out = torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    residual_out = torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    if out.numel():
        results = out.view(rows.shape), residual_out.view(rows.shape)
        launch(add_layer_norm_kernel, grid, (rows, kept, weight, bias, *results, eps, *tile))
    return out, residual_out
