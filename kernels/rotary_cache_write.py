"""Rotary embedding of queries and keys, and the update of a static cache, in one cuTile launch (half-split form).

    q_out = rotated q,  keys[:, :, p] = rotated k,  values[:, :, p] = v          at each given position p

Rounded as in rotary_embedding.py, whose tiles this kernel has: a block takes HEADS heads at POSITIONS positions. Blocks
after the last group of query heads take the keys, and those after them copy the values. Keys and values go where
`positions` says, and nowhere if that is outside of the cache. Nothing else of the cache is touched, so one step of a
sequence costs a launch of a few microseconds, where there were two, one of them with a kernel for the positions.

`rotary_cache_write_` writes into the cache that it is given; `rotary_cache_write` writes into a copy of it.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .rotary_embedding import _result_dtype, heads_tile, pick_tiles, rotate_block, turned

Int = ct.Constant[int]


def write_rows(array, batch, group, positions, tile, shape):
    """Put the block's heads into the cache; the tile may be wider and longer than what there is."""
    number = ct.bid(0) * shape[2] + ct.arange(shape[2], dtype=ct.int32)
    place = ct.reshape(ct.astype(ct.gather(positions, number), ct.int32), (1, 1, shape[2], 1))
    heads = ct.reshape(group * shape[1] + ct.arange(shape[1], dtype=ct.int32), (1, shape[1], 1, 1))
    columns = ct.reshape(ct.arange(shape[3], dtype=ct.int32), (1, 1, 1, shape[3]))
    is_given = ct.reshape(number < positions.shape[0], (1, 1, shape[2], 1))
    ct.scatter(array, (batch, heads, place, columns), ct.astype(tile, array.dtype), mask=is_given)


def write_turned(k, cos, sin, keys, positions, group, half, shape, whole):
    """Rotate the block's keys and write them."""
    batch = ct.bid(2)
    first, second = turned(k, cos, sin, batch, group, ct.bid(0), half, shape, whole, keys.dtype)
    write_rows(keys.slice(3, 0, half), batch, group, positions, first, shape)
    write_rows(keys.slice(3, half, 2 * half), batch, group, positions, second, shape)


@ct.kernel
def rotary_cache_write_kernel(
    q, k, v, cos, sin, keys, values, positions, q_out,
    HALF_DIM: Int, Q_GROUPS: Int, K_GROUPS: Int, HEADS: Int, POSITIONS: Int, HALF: Int, WIDTH: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    group = ct.bid(1)
    shape = (1, HEADS, POSITIONS, HALF)
    if group < Q_GROUPS:
        rotate_block(q, cos, sin, q_out, group, HALF_DIM, shape, True)
    elif group < Q_GROUPS + K_GROUPS:
        group -= Q_GROUPS
        if HALF != HALF_DIM:
            write_turned(k, cos, sin, keys, positions, group, HALF_DIM, shape, False)
        elif ((group + 1) * HEADS <= k.shape[1]) & ((ct.bid(0) + 1) * POSITIONS <= k.shape[2]):
            write_turned(k, cos, sin, keys, positions, group, HALF_DIM, shape, True)
        else:
            write_turned(k, cos, sin, keys, positions, group, HALF_DIM, shape, False)
    else:
        group -= Q_GROUPS + K_GROUPS
        whole = (1, HEADS, POSITIONS, WIDTH)
        tile = heads_tile(v, ct.bid(2), group, ct.bid(0), whole, False)
        write_rows(values, ct.bid(2), group, positions, tile, whole)


def rotary_cache_write_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`rotary_cache_write` into the cache itself; returns the rotated queries."""
    batch, heads, length, dim = q.shape
    if cos.shape[0] != batch:
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    q_out = torch.empty(q.shape, dtype=_result_dtype(q, cos, True), device=q.device)
    per_heads, per_positions, half = pick_tiles(heads, length, max(dim // 2, 1))
    q_groups, k_groups = (-(-x.shape[1] // per_heads) if dim else 0 for x in (q, k))
    v_groups = -(-v.shape[1] // per_heads) if v.shape[3] else 0
    grid = (-(-length // per_positions), q_groups + k_groups + v_groups, batch)
    if all(grid):
        arrays = (q, k, v, cos, sin, keys, values, positions, q_out)
        tile = (per_heads, per_positions, half, covering_power(max(v.shape[3], 1)))
        launch(rotary_cache_write_kernel, grid, (*arrays, dim // 2, q_groups, k_groups, *tile))
    return q_out


def rotary_cache_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotates queries and keys, every step rounded to the model's dtype, and puts keys and values into a cache.

    Args:
        q: [batch, heads, length, head_dim], any strides, float32, float16 or bfloat16; head_dim is even.
        k: [batch, key heads, length, head_dim].
        v: [batch, key heads, length, value_dim].
        cos: [batch or 1, length, head_dim], both halves given.
        sin: Like `cos`.
        keys: [batch, key heads, tokens, head_dim], the cache's.
        values: [batch, key heads, tokens, value_dim].
        positions: [length] int64, where in the cache; no two are alike.

    Returns:
        The rotated queries, the new keys and the new values, contiguous.
    """
    keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
    return rotary_cache_write_(q, k, v, cos, sin, keys, values, positions), keys, values
