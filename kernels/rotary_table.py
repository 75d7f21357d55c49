"""Tables of cosines and sines for rotary embeddings in cuTile: position p at frequency f turns by p * f.

    cos_out[b, p, j] = cos(position[b, p] * frequency[j mod R]) * scale, for COPIES * R columns j

and sin_out likewise. Angles, products and functions are float32, the results are rounded once. One block
takes POSITIONS positions at all frequencies and writes both tables.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

#: Elements of one block.
BLOCK = 1024

Int = ct.Constant[int]


@ct.kernel
def rotary_table_kernel(
    position, frequency, cos_out, sin_out, scale, COPIES: Int, POSITIONS: Int, COLUMNS: Int
):  # fmt: skip
    row = ct.reshape(ct.bid(0) * POSITIONS + ct.arange(POSITIONS, dtype=ct.int32), (POSITIONS, 1))
    column = ct.reshape(ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    width = frequency.shape[0]
    angle = ct.astype(ct.gather(position, row), ct.float32) * ct.gather(frequency, column)
    cos = ct.astype(ct.cos(angle) * scale, cos_out.dtype)
    sin = ct.astype(ct.sin(angle) * scale, sin_out.dtype)
    for copy in ct.static_iter(range(COPIES)):
        place = ct.where(column < width, column + copy * width, COPIES * width)  # others are outside and dropped
        ct.scatter(cos_out, (row, place), cos)
        ct.scatter(sin_out, (row, place), sin)


def _table(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, copies: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    width = frequencies.shape[0]
    shape = (*positions.shape[:-1], copies * width)
    cos = torch.empty(shape, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if cos.numel():
        rows = positions.numel()
        columns = 1 << (width - 1).bit_length()
        tile = max(1, min(BLOCK // columns, 1 << (rows - 1).bit_length()))
        tables = cos.view(rows, -1), sin.view(rows, -1)
        args = (positions.reshape(-1), frequencies, *tables, scale, copies, tile, columns)
        launch(rotary_table_kernel, (-(-rows // tile),), args)
    return cos, sin


def rotary_table(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines in bfloat16, each angle in both halves.

    Args:
        positions: [..., 1], integers.
        frequencies: [half the rotated columns], float32.

    Returns:
        Both tables, [..., rotated columns].
    """
    return _table(positions, frequencies, 1.0, 2, torch.bfloat16)


def rotary_table_fp32(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_table` in float32."""
    return _table(positions, frequencies, 1.0, 2, torch.float32)


def rotary_table_half_width(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines times `scale` in bfloat16, each angle once: [..., half the rotated columns]."""
    return _table(positions, frequencies, scale, 1, torch.bfloat16)


def rotary_table_scaled(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_table` with all values times `scale`."""
    return _table(positions, frequencies, scale, 2, torch.bfloat16)
