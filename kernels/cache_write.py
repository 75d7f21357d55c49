"""The update of a static cache by new keys and values, in one cuTile launch.

    keys[:, :, p] = k,  values[:, :, p] = v          at each given position p

For models whose keys come from a kernel that this does not know (a norm before the rotation, say); where they come from
a plain rotary embedding, rotary_cache_write.py does both. A block takes HEADS heads at POSITIONS positions, whole rows;
blocks after the last group of keys take the values. What lies outside of the cache is written nowhere.

`cache_write_` writes into the cache that it is given; `cache_write` writes into a copy of it.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .rotary_cache_write import write_rows
from .rotary_embedding import heads_tile, pick_tiles

Int = ct.Constant[int]


@ct.kernel
def cache_write_kernel(
    k, v, keys, values, positions,
    GROUPS: Int, HEADS: Int, POSITIONS: Int, WIDTH: Int, VALUE_WIDTH: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    group, batch = ct.bid(1), ct.bid(2)
    if group < GROUPS:
        shape = (1, HEADS, POSITIONS, WIDTH)
        write_rows(keys, batch, group, positions, heads_tile(k, batch, group, ct.bid(0), shape, False), shape)
    else:
        group -= GROUPS
        shape = (1, HEADS, POSITIONS, VALUE_WIDTH)
        write_rows(values, batch, group, positions, heads_tile(v, batch, group, ct.bid(0), shape, False), shape)


def cache_write_(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
) -> None:
    """`cache_write` into the cache itself."""
    batch, heads, length, width = k.shape
    widths = covering_power(max(width, 1)), covering_power(max(v.shape[3], 1))
    per_heads, per_positions, _ = pick_tiles(heads, length, max(widths) // 2 or 1)
    groups, value_groups = (-(-heads // per_heads) if x.shape[3] else 0 for x in (k, v))
    grid = (-(-length // per_positions), groups + value_groups, batch)
    if all(grid):
        tile = (per_heads, per_positions, *widths)
        launch(cache_write_kernel, grid, (k, v, keys, values, positions, groups, *tile))


def cache_write(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts new keys and values into a cache.

    Args:
        k: [batch, key heads, length, head_dim], any strides, float32, float16 or bfloat16.
        v: [batch, key heads, length, value_dim].
        keys: [batch, key heads, tokens, head_dim], the cache's.
        values: [batch, key heads, tokens, value_dim].
        positions: [length] int64, where in the cache; no two are alike.

    Returns:
        The new keys and the new values, contiguous.
    """
    keys, values = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
    cache_write_(k, v, keys, values, positions)
    return keys, values
