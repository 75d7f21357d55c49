"""Rotary embedding of queries and keys in one launch, in cuTile (half-split form: the second half is the partner).

    out[:half] = x[:half] * cos[:half] - x[half:] * sin[:half]
    out[half:] = x[half:] * cos[half:] + x[:half] * sin[half:]

`rotary_embedding` rounds both products and the sum to the model's dtype, as the eager code does; the float32 form keeps
them in float32 and rounds once. Both halves of cos and sin are read: nothing says that they are equal.

Tiles. Arrays stay [batch, heads, positions, head_dim] with their own strides, so the transposed view of a projection is
read in place; the results are contiguous. A block takes HEADS heads at POSITIONS positions, so that each value of cos
and sin is loaded once for HEADS heads. HALF is head_dim / 2 rounded up to a power of two (head_dim 80 and 96 idle the
lanes above), and the two halves are slices of the arrays, so that neither reads beyond its own end. Blocks after the
last group of query heads take the keys: a second launch would cost more than the whole kernel in a decode step.
"""

from __future__ import annotations

from functools import lru_cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

#: Rows (head, position) of one block, in units of 64 columns a half: four 16-byte loads in flight for each thread.
BLOCK_ROWS = 32
#: Heads that share one load of cos and sin.
MAX_HEADS = 8

Int = ct.Constant[int]
Flag = ct.Constant[bool]


def get(array, index, shape, whole):
    if whole:
        return ct.load(array, index, shape=shape, check_bounds=False, allow_tma=False)
    return ct.load(array, index, shape=shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def put(array, index, tile, whole):
    if whole:
        ct.store(array, index, ct.astype(tile, array.dtype), check_bounds=False, allow_tma=False)
    else:
        ct.store(array, index, ct.astype(tile, array.dtype), allow_tma=False)


def product(x, factor, dtype):
    """x * factor, rounded to `dtype`; in float32 for the sum."""
    return ct.astype(ct.astype(ct.astype(x, ct.float32) * ct.astype(factor, ct.float32), dtype), ct.float32)


def rotate(x, cos, sin, out, batch, group, position, half, shape, whole, dtype):
    """Rotates one block of heads. `dtype` is what the products are rounded to."""
    index = (batch, group, position, 0)
    angles = (batch, position, 0)
    few = (1, shape[2], shape[3])
    many = (1, 1, shape[2], shape[3])
    low = get(x.slice(3, 0, half), index, shape, whole)
    high = get(x.slice(3, half, 2 * half), index, shape, whole)
    cos_low = ct.reshape(get(cos.slice(2, 0, half), angles, few, whole), many)
    cos_high = ct.reshape(get(cos.slice(2, half, 2 * half), angles, few, whole), many)
    sin_low = ct.reshape(get(sin.slice(2, 0, half), angles, few, whole), many)
    sin_high = ct.reshape(get(sin.slice(2, half, 2 * half), angles, few, whole), many)
    put(out.slice(3, 0, half), index, product(low, cos_low, dtype) - product(high, sin_low, dtype), whole)
    put(out.slice(3, half, 2 * half), index, product(high, cos_high, dtype) + product(low, sin_high, dtype), whole)


@ct.kernel
def rotary_embedding_kernel(
    q, k, cos, sin, q_out, k_out,
    ROUND: Flag, HALF_DIM: Int, HEADS: Int, POSITIONS: Int, HALF: Int, Q_GROUPS: Int, Q_FITS: Flag, K_FITS: Flag,
):  # fmt: skip
    position, group, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    shape = (1, HEADS, POSITIONS, HALF)
    if group < Q_GROUPS:
        dtype = q_out.dtype if ROUND else ct.float32
        rotate(q, cos, sin, q_out, batch, group, position, HALF_DIM, shape, Q_FITS, dtype)
    else:
        dtype = k_out.dtype if ROUND else ct.float32
        rotate(k, cos, sin, k_out, batch, group - Q_GROUPS, position, HALF_DIM, shape, K_FITS, dtype)
