"""Rotary embedding of queries and keys in one launch, in cuTile (half-split form).

    out[:half] = x[:half] * cos[:half] - x[half:] * sin[:half]
    out[half:] = x[half:] * cos[half:] + x[:half] * sin[half:]

`rotary_embedding` rounds both products and the sum to the model's dtype, as the eager code does; the float32
form keeps them in float32 and rounds once. Both halves of cos and sin are read: nothing says that they are
equal.

Tiles. Arrays stay [batch, heads, positions, head_dim] with their own strides, so the transposed view of a
projection is read in place; the results are contiguous. A block takes HEADS heads at POSITIONS positions, so
that each value of cos and sin is loaded once for HEADS heads. HALF is head_dim / 2 rounded up to a power of
two, and the two halves are slices of the arrays, so that neither reads beyond its own end. Blocks after the
last group of query heads take the keys: a second launch would cost more than the whole kernel in a decode step.
"""

from __future__ import annotations

from functools import lru_cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Rows (head, position) of one block, if a half has 64 columns: four 16-byte loads in flight for each thread.
BLOCK_ROWS = 32
#: The same where every step is rounded, which needs half the registers: 6% faster over prompts of 2048 and more, where
#: the float32 form got 1 to 7% slower (benchmarks/2026-11-30_h200_third).
ROUNDED_ROWS = 64
#: Heads that share one load of cos and sin.
MAX_HEADS = 8

Int = ct.Constant[int]
Flag = ct.Constant[bool]


def heads_tile(array, batch, group, position, shape, whole):
    """A block of heads and positions; what lies outside of the array reads as zero."""
    if whole:
        return ct.load(array, (batch, group, position, 0), shape=shape, check_bounds=False, allow_tma=False)
    heads = ct.reshape(group * shape[1] + ct.arange(shape[1], dtype=ct.int32), (1, shape[1], 1, 1))
    positions = ct.reshape(position * shape[2] + ct.arange(shape[2], dtype=ct.int32), (1, 1, shape[2], 1))
    columns = ct.reshape(ct.arange(shape[3], dtype=ct.int32), (1, 1, 1, shape[3]))
    return ct.gather(array, (batch, heads, positions, columns))


def angle_tile(array, batch, position, shape, whole):
    """Half of cos or sin at the block's positions, to be broadcast over its heads."""
    if whole:
        tile = ct.load(array, (batch, position, 0), shape=(1, shape[2], shape[3]), check_bounds=False, allow_tma=False)
        return ct.reshape(tile, (1, 1, shape[2], shape[3]))
    positions = ct.reshape(position * shape[2] + ct.arange(shape[2], dtype=ct.int32), (1, 1, shape[2], 1))
    columns = ct.reshape(ct.arange(shape[3], dtype=ct.int32), (1, 1, 1, shape[3]))
    return ct.gather(array, (batch, positions, columns))


def put(array, batch, group, position, tile, whole):
    tile = ct.astype(tile, array.dtype)
    if whole:
        ct.store(array, (batch, group, position, 0), tile, check_bounds=False, allow_tma=False)
    else:
        ct.store(array, (batch, group, position, 0), tile, allow_tma=False)


def product(x, factor, dtype):
    """x * factor rounded to `dtype`.

    bfloat16 multiplies and adds natively, in a third of the instructions, and the two stay separate (read in
    the disassembly for sm_80, sm_90 and sm_100). Float16 goes through float32: the compiler would fuse its
    product into the sum and drop the rounding between them.
    """
    if x.dtype == ct.bfloat16 and factor.dtype == ct.bfloat16 and dtype == ct.bfloat16:
        return x * factor
    return ct.astype(ct.astype(ct.astype(x, ct.float32) * ct.astype(factor, ct.float32), dtype), ct.float32)


def turned(x, cos, sin, batch, group, position, half, shape, whole, dtype, start=0):
    """Both halves of the block's heads, rotated: the columns of each half from `start` on."""
    middle, end = half + start, 2 * half
    low = heads_tile(x.slice(3, start, half), batch, group, position, shape, whole)
    high = heads_tile(x.slice(3, middle, end), batch, group, position, shape, whole)
    cos_low = angle_tile(cos.slice(2, start, half), batch, position, shape, whole)
    cos_high = angle_tile(cos.slice(2, middle, end), batch, position, shape, whole)
    sin_low = angle_tile(sin.slice(2, start, half), batch, position, shape, whole)
    sin_high = angle_tile(sin.slice(2, middle, end), batch, position, shape, whole)
    first = product(low, cos_low, dtype) - product(high, sin_low, dtype)
    second = product(high, cos_high, dtype) + product(low, sin_high, dtype)
    return first, second


def rotate(x, cos, sin, out, batch, group, position, half, shape, whole, dtype, start=0):
    first, second = turned(x, cos, sin, batch, group, position, half, shape, whole, dtype, start)
    put(out.slice(3, start, half), batch, group, position, first, whole)
    put(out.slice(3, half + start, 2 * half), batch, group, position, second, whole)


def rotate_block(x, cos, sin, out, group, half, shape, round_products):
    """Rotates the block's heads of one array, without bounds checks where the block lies inside of it.

    A half that is two powers of two wide (40 = 32 + 8, 48 = 32 + 16) is rotated in two pieces then, in float32: cos and
    sin have 4 bytes, and a gather reads them one by one.
    """
    position, batch = ct.bid(0), ct.bid(2)
    dtype = out.dtype if round_products else ct.float32
    piece = shape[3] if shape[3] == half else shape[3] // 2
    rest = half - piece
    if rest & (rest - 1) != 0 or (rest > 0 and round_products):
        rotate(x, cos, sin, out, batch, group, position, half, shape, False, dtype)
    elif ((group + 1) * shape[1] <= out.shape[1]) & ((position + 1) * shape[2] <= out.shape[2]):
        rotate(x, cos, sin, out, batch, group, position, half, (*shape[:3], piece), True, dtype)
        if rest > 0:
            rotate(x, cos, sin, out, batch, group, position, half, (*shape[:3], rest), True, dtype, piece)
    else:
        rotate(x, cos, sin, out, batch, group, position, half, shape, False, dtype)


@ct.kernel
def rotary_embedding_kernel(
    q, k, cos, sin, q_out, k_out,
    ROUND: Flag, HALF_DIM: Int, Q_GROUPS: Int, HEADS: Int, POSITIONS: Int, HALF: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    group = ct.bid(1)
    shape = (1, HEADS, POSITIONS, HALF)
    if group < Q_GROUPS:
        rotate_block(q, cos, sin, q_out, group, HALF_DIM, shape, ROUND)
    else:
        rotate_block(k, cos, sin, k_out, group - Q_GROUPS, HALF_DIM, shape, ROUND)


@lru_cache(maxsize=4096)
def pick_tiles(heads: int, positions: int, half: int, block_rows: int = BLOCK_ROWS) -> tuple[int, int, int]:
    """Chooses HEADS, POSITIONS and HALF for a number of query heads, of positions, and half a head dimension.

    Up to MAX_HEADS heads share their cos and sin. POSITIONS fills the block up to `block_rows` rows of 64
    columns; in a decode step it is 1.
    """
    lanes = covering_power(half)
    per_heads = min(MAX_HEADS, covering_power(heads))
    rows = max(1, block_rows * 64 // lanes // per_heads)
    return per_heads, min(rows, covering_power(positions)), lanes


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, round_products: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_heads, positions, dim = q.shape
    k_heads = k.shape[1]
    if cos.shape[0] != batch:
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    q_out = torch.empty(q.shape, dtype=_result_dtype(q, cos, round_products), device=q.device)
    k_out = torch.empty(k.shape, dtype=_result_dtype(k, cos, round_products), device=k.device)
    if q_out.numel() and k_out.numel():
        whole = covering_power(dim // 2) == dim // 2
        tile = pick_tiles(q_heads, positions, dim // 2, ROUNDED_ROWS if round_products and whole else BLOCK_ROWS)
        q_groups, k_groups = -(-q_heads // tile[0]), -(-k_heads // tile[0])
        grid = (-(-positions // tile[1]), q_groups + k_groups, batch)
        arrays = q, k, cos, sin, q_out, k_out
        launch(rotary_embedding_kernel, grid, (*arrays, round_products, dim // 2, q_groups, *tile))
    elif q_out.numel():
        q_out, _ = _rotated(q, q, cos, sin, round_products)
    elif k_out.numel():
        k_out, _ = _rotated(k, k, cos, sin, round_products)
    return q_out, k_out


def _result_dtype(x: torch.Tensor, cos: torch.Tensor, round_products: bool) -> torch.dtype:
    if x.dtype == cos.dtype or not round_products:
        return x.dtype
    return torch.promote_types(x.dtype, cos.dtype)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys, every step rounded to the dtype that `q * cos` has.

    Args:
        q: [batch, heads, positions, head_dim], any strides, float32, float16 or bfloat16; head_dim is even.
        k: [batch, key heads, positions, head_dim].
        cos: [batch or 1, positions, head_dim], both halves given.
        sin: like `cos`.

    Returns:
        The rotated queries and keys, contiguous.
    """
    return _rotated(q, k, cos, sin, True)


def rotary_embedding_fp32(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys in float32 and rounds once; arguments as for `rotary_embedding`."""
    return _rotated(q, k, cos, sin, False)
