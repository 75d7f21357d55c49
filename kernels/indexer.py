"""Scores of an indexer, which picks the keys that sparse attention sees, in cuTile:

    out[s, t] = sum over heads h of weights[s, h] * max(scale * q[s, h] . k[t], 0)

The heads of one query are the rows of a product on the matrix units, KEYS keys its columns, and the products of the
heads live in registers alone: for 64 heads they are 64 times as large as the result. A block keeps its tile of keys and
walks along POSITIONS queries. Sums are in float32.
"""

from __future__ import annotations

from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Rows and columns of a product have at least this many elements on the matrix units.
LEAST = 16

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]


@ct.kernel
def indexer_scores_kernel(q, k, weights, out, scale, HEADS: Int, KEYS: Int, WIDTH: Int, POSITIONS: Int):
    column, batch = ct.bid(0), ct.bid(2)
    first = ct.bid(1) * POSITIONS
    tile = ct.load(k, (batch, 0, column), (1, WIDTH, KEYS), order=(0, 2, 1), padding_mode=ZERO)
    keys = ct.reshape(tile, (WIDTH, KEYS))
    for position in range(first, ct.minimum(first + POSITIONS, q.shape[1])):
        heads = ct.load(q, (batch, position, 0, 0), (1, 1, HEADS, WIDTH), padding_mode=ZERO)
        products = ct.mma(ct.reshape(heads, (HEADS, WIDTH)), keys, ct.zeros((HEADS, KEYS), ct.float32))
        shares = ct.load(weights, (batch, position, 0), (1, 1, HEADS), padding_mode=ZERO)
        shares = ct.reshape(ct.astype(shares, ct.float32), (HEADS, 1))
        scores = ct.sum(ct.maximum(products * scale, 0.0, propagate_nan=True) * shares, axis=0)
        ct.store(out, (batch, position, column), ct.reshape(ct.astype(scores, out.dtype), (1, 1, KEYS)))


@cache
def pick_tiles(queries: int, heads: int, width: int, itemsize: int) -> tuple[int, int, int, int]:
    """HEADS, KEYS, WIDTH and POSITIONS of a block."""
    keys = 128 if queries > LEAST and itemsize == 2 else 32
    return max(LEAST, covering_power(heads)), keys, max(LEAST, covering_power(width)), min(8, covering_power(queries))


def indexer_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """The weighted sum over heads of the positive parts of `scale` q k^T.

    Args:
        q: [batch, queries, heads, head_dim], any strides, float32, float16 or bfloat16.
        k: [batch, keys, head_dim], the same dtype.
        weights: [batch, queries, heads], float.
        scale: Factor on the products.

    Returns:
        float32 [batch, queries, keys], contiguous.
    """
    batch, queries, heads, width = q.shape
    out = torch.empty(batch, queries, k.shape[1], dtype=torch.float32, device=q.device)
    if not heads or not width:
        out.zero_()
    elif out.numel():
        tiles = pick_tiles(queries, heads, width, q.itemsize)
        grid = (-(-k.shape[1] // tiles[1]), -(-queries // tiles[3]), batch)
        launch(indexer_scores_kernel, grid, (q, k, weights, out, scale, *tiles))
    return out
