"""Positions of tokens in rows with padding, in cuTile:

    position[n] = padding_idx + (past + number of tokens up to n) for a token, padding_idx for padding

A block walks along one row, WIDTH ids at a time, and carries the count.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Most ids of one step.
MAX_WIDTH = 1024

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]


@ct.kernel
def padded_positions_kernel(ids, out, padding_idx, past, WIDTH: Int):
    row = ct.bid(0)
    count = ct.zeros((1, 1), ct.int32) + past
    for step in range(ct.num_tiles(ids, 1, (1, WIDTH))):
        is_token = ct.where(ct.load(ids, (row, step), (1, WIDTH), padding_mode=ZERO) == padding_idx, 0, 1)
        position = ct.where(is_token > 0, count + ct.cumsum(is_token, axis=1), 0) + padding_idx
        ct.store(out, (row, step), ct.astype(position, out.dtype))
        count = count + ct.sum(is_token, axis=1, keepdims=True)


def padded_positions(ids: torch.Tensor, padding_idx: int, past: int) -> torch.Tensor:
    """The position of each token of its row, counted from `padding_idx` + 1 + `past` on.

    Args:
        ids: [rows, tokens], integers.
        padding_idx: The id of padding, and its position.
        past: Tokens before the first.

    Returns:
        int64 [rows, tokens], contiguous.
    """
    out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if out.numel():
        width = min(MAX_WIDTH, covering_power(ids.shape[1]))
        launch(padded_positions_kernel, (ids.shape[0],), (ids, out, padding_idx, past, width))
    return out
