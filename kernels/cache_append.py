"""Appending to a key/value cache in cuTile: out = (cache, new), one copy of both into a new tensor.

Each head of each sequence is one long row: the past, then the new tokens. Nearly all blocks lie in the past
and copy a full tile without bounds checks; the few at the seam and in the new tokens gather from both under a
mask. A block takes 4096 elements: with 128 threads, four 16-byte loads in flight for each thread, enough to
hide memory's latency.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

#: Elements of one block.
TILE = 4096


@ct.kernel
def cache_append_kernel(cache, new, out, WIDTH: ct.Constant[int]):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    past, length = cache.shape[1], out.shape[1]
    tiles = ct.cdiv(length, WIDTH)
    row, k = ct.bid(0) // tiles, ct.bid(0) % tiles
    if (k + 1) * WIDTH <= past:
        tile = ct.load(cache, (row, k), shape=(1, WIDTH), check_bounds=False, allow_tma=False)
        ct.store(out, (row, k), tile, check_bounds=False, allow_tma=False)
    else:
        columns = k * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        is_past = columns < past
        old = ct.gather(cache, (row, columns), mask=is_past)
        fresh = ct.gather(new, (row, columns - past), mask=~is_past)
        ct.scatter(out, (row, columns), ct.where(is_past, old, fresh))


def cache_append(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The cache followed by the new tokens.

    Args:
        cache: [B, Hk, T, D], float32, float16 or bfloat16; any strides (others than contiguous cost a copy).
        new: [B, Hk, S, D] of the same dtype.

    Returns:
        [B, Hk, T + S, D], contiguous.
    """
    batch, heads, past, width = cache.shape
    length = past + new.shape[2]
    out = torch.empty((batch, heads, length, width), dtype=cache.dtype, device=cache.device)
    rows = batch * heads
    if out.numel():
        tile = min(TILE, max(16, 1 << (length * width - 1).bit_length()))
        args = (cache.reshape(rows, -1), new.reshape(rows, -1), out.view(rows, -1), tile)
        launch(cache_append_kernel, (rows * -(-length * width // tile),), args)
    return out
