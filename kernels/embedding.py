"""Rows of a table in cuTile: out[n] = weight[ids[n]].

A block copies one chunk of ROWS rows. An id outside of the table reads zeros: PyTorch does not define what it gives.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Elements of one block, and its most columns.
BLOCK, MAX_COLUMNS = 4096, 1024

Int = ct.Constant[int]


@ct.kernel
def embedding_kernel(ids, weight, out, ROWS: Int, COLUMNS: Int):
    row = ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    column = ct.reshape(ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    token = ct.reshape(ct.gather(ids, row), (ROWS, 1))
    ct.scatter(out, (ct.reshape(row, (ROWS, 1)), column), ct.gather(weight, (token, column)))


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """The rows of a table for some ids.

    Args:
        ids: Any shape, integers.
        weight: [entries, width], any dtype.
        padding_idx: Whose row training leaves alone; the values do not depend on it.

    Returns:
        Contiguous [*ids.shape, width].
    """
    width = weight.shape[1]
    out = torch.empty(*ids.shape, width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        flat = ids.reshape(-1)
        columns = min(MAX_COLUMNS, covering_power(width))
        rows = min(covering_power(flat.numel()), max(1, BLOCK // columns))
        grid = (-(-flat.numel() // rows), -(-width // columns))
        launch(embedding_kernel, grid, (flat, weight, out.view(-1, width), rows, columns))
    return out
