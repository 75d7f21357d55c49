"""Two arrays side by side along their last dimension, in cuTile.

    out[..., :A] = a, out[..., A:] = b

Every array is [batch, heads, positions, columns] with strides of its own; b may have one head that all share. A block
copies ROWS positions of one head: first the columns of a, then those of b, each in tiles of a power of two that are
clipped at the end. Nothing is rounded.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Elements of one block.
BLOCK = 4096
#: Columns of one tile.
MAX_COLUMNS = 512

Int = ct.Constant[int]


def copy_part(source, out, head, rows, columns):
    batch, row = ct.bid(2), ct.bid(0)
    for step in range(ct.cdiv(out.shape[3], columns)):
        tile = ct.load(source, (batch, head, row, step), (1, 1, rows, columns), padding_mode=ct.PaddingMode.ZERO)
        ct.store(out, (batch, ct.bid(1), row, step), tile)


@ct.kernel
def concat_kernel(a, b, out_a, out_b, ROWS: Int, A_COLUMNS: Int, B_COLUMNS: Int):
    copy_part(a, out_a, ct.bid(1), ROWS, A_COLUMNS)
    copy_part(b, out_b, ct.bid(1) % b.shape[1], ROWS, B_COLUMNS)


def concat_last(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` and `b` side by side.

    Args:
        a: [batch, heads, positions, columns], any strides, float32, float16 or bfloat16.
        b: the same but for its number of columns.

    Returns:
        Contiguous [batch, heads, positions, columns of a + columns of b].
    """
    batch, heads, positions, width = a.shape
    out = torch.empty(batch, heads, positions, width + b.shape[-1], dtype=a.dtype, device=a.device)
    if out.numel():
        columns = [min(MAX_COLUMNS, covering_power(x.shape[-1])) for x in (a, b)]
        rows = min(covering_power(positions), max(1, BLOCK // max(columns)))
        grid = (-(-positions // rows), heads, batch)
        launch(concat_kernel, grid, (a, b, out[..., :width], out[..., width:], rows, *columns))
    return out


def concat_last_shared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`concat_last` where `b` is [batch, 1, positions, columns], the same for every head."""
    return concat_last(a, b)
