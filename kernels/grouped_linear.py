"""Linear layers of several experts at once, in cuTile: each row goes through the matrix of its own expert.

    out[r] = weight[e] x[r] for the rows r of expert e, which stand together: ends[e - 1] <= r < ends[e]

Matrices are stored [out, in] where OUT_FIRST, else [in, out]: their strides tell. A grid cannot depend on how many
rows an expert has, so there are N / ROWS + E blocks along N rows, and each finds its expert and rows from `ends`; those
that find none do nothing. Rows from ends[-1] on belong to no expert and are not written. Sums are in float32.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, with_hints

from .experts import grouped_product, most_blocks, own_tile, pick_tiling, put_rows, row_numbers, steps_of

Int = ct.Constant[int]


@ct.kernel
def grouped_linear_kernel(
    x, weight, ends, out, OUT_FIRST: ct.Constant[bool], EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int
):  # fmt: skip
    expert, tile, first, last = own_tile(ends, ct.bid(0), ROWS, EXPERTS)
    column = ct.bid(1)
    steps = steps_of(first, last, x.shape[1], DEPTH)
    sums = grouped_product(x, tile, steps, weight, expert, column, ROWS, (DEPTH, COLUMNS), OUT_FIRST)
    put_rows(out, row_numbers(tile, first, last, ROWS, x.shape[0]), column, ct.astype(sums, out.dtype))


def _grouped(
    input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, columns: int, out_first: bool
) -> torch.Tensor:
    rows, experts = input.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=input.dtype, device=input.device)
    if out.numel() and experts:
        tiling = pick_tiling(rows, experts, input.itemsize)
        blocks = most_blocks(rows, experts, tiling.rows)
        cut = (covering_power(experts), tiling.rows, tiling.columns, tiling.depth)
        grid = (blocks, -(-columns // tiling.columns))
        launch(with_hints(grouped_linear_kernel, tiling.occupancy), grid, (input, weight, ends, out, out_first, *cut))
    return out


def grouped_linear(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows of each expert times its matrix.

    Args:
        input: [rows, in], sorted by expert, float32, float16 or bfloat16.
        weight: [experts, in, out], the same dtype, any strides.
        ends: [experts], int32: the row after the last of each expert, never falling; rows that there are not are
            left out.

    Returns:
        [rows, out], contiguous; rows from the last of `ends` on hold anything.
    """
    out_first = weight.stride(1) == 1
    return _grouped(input, weight.transpose(1, 2) if out_first else weight, ends, weight.shape[2], out_first)


def batched_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As many rows for every expert: [experts, rows, in] times [experts, in, out].

    Args:
        input: Any strides, float32, float16 or bfloat16.
        weight: The same dtype.

    Returns:
        [experts, rows, out], contiguous.
    """
    experts, rows, width = input.shape
    ends = torch.arange(rows, (experts + 1) * rows, max(rows, 1), dtype=torch.int32, device=input.device)
    out = _grouped(input.reshape(experts * rows, width), weight, ends, weight.shape[2], False)
    return out.view(experts, rows, weight.shape[2])
