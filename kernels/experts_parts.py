"""What stands around the products of routed experts, in cuTile, for experts whose gate has no kernel of its own:

    experts_rows      the rows of all pairs of a token and an expert, sorted by expert
    experts_combine   y[t] = sum over k of w[t, k] * row of pair (t, k)

A pair is a token with one of its experts, numbered t * K + k. The sort is that of kernels/experts.py. To sum, the order
is turned round first, so that a block finds the K rows of its token; sums are in float32.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .experts import SORT_WIDTH, experts_sort_kernel

#: Elements of one block, and its most columns.
BLOCK, MAX_COLUMNS = 4096, 1024

Int = ct.Constant[int]


@ct.kernel
def experts_rows_kernel(x, order, rows, PER_TOKEN: Int, ROWS: Int, COLUMNS: Int):
    row = ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    column = ct.reshape(ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    token = ct.reshape(ct.astype(ct.gather(order, row), ct.int32) // PER_TOKEN, (ROWS, 1))
    ct.scatter(rows, (ct.reshape(row, (ROWS, 1)), column), ct.gather(x, (token, column)))


@ct.kernel
def experts_inverse_kernel(order, inverse, WIDTH: Int):
    row = ct.bid(0) * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
    pair = ct.astype(ct.gather(order, row, padding_value=order.shape[0]), ct.int32)  # beyond the last is dropped
    ct.scatter(inverse, pair, row)


@ct.kernel
def experts_combine_kernel(rows, weights, inverse, out, PER_TOKEN: Int, CHOICES: Int, COLUMNS: Int):
    token = ct.bid(1)
    column = ct.bid(0) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
    choice = ct.arange(CHOICES, dtype=ct.int32)
    pair = ct.where(choice < PER_TOKEN, token * PER_TOKEN + choice, inverse.shape[0])
    row = ct.reshape(ct.gather(inverse, pair, padding_value=rows.shape[0]), (CHOICES, 1))
    values = ct.astype(ct.gather(rows, (row, ct.reshape(column, (1, COLUMNS)))), ct.float32)
    shares = ct.reshape(ct.astype(ct.gather(weights, pair), ct.float32), (CHOICES, 1))
    ct.scatter(out, (token, column), ct.astype(ct.sum(values * shares, axis=0), out.dtype))


def experts_rows(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of all pairs, sorted by expert; pairs of one expert keep their order.

    Args:
        hidden_states: [tokens, hidden], any dtype.
        top_k_index: [tokens, experts of a token], integers; a pair whose expert is not from 0 to `count` - 1 stands
            behind the rows of all experts.
        count: Experts.

    Returns:
        Rows [pairs, hidden], which pair each is as int64, and for each expert the row after its last as int32.
    """
    pairs, width = top_k_index.numel(), hidden_states.shape[1]
    device = hidden_states.device
    rows = torch.empty(pairs, width, dtype=hidden_states.dtype, device=device)
    order = torch.empty(pairs, dtype=torch.int64, device=device)
    ends = torch.zeros(count, dtype=torch.int32, device=device)
    if pairs:
        launch(experts_sort_kernel, (count + 1,), (top_k_index.reshape(-1), order, ends, SORT_WIDTH))
    if rows.numel():
        columns = min(MAX_COLUMNS, covering_power(width))
        height = min(covering_power(pairs), max(1, BLOCK // columns))
        grid = (-(-pairs // height), -(-width // columns))
        launch(experts_rows_kernel, grid, (hidden_states, order, rows, top_k_index.shape[1], height, columns))
    return rows, order, ends


def experts_combine(rows: torch.Tensor, top_k_weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's rows.

    Args:
        rows: [pairs, hidden], float32, float16 or bfloat16.
        top_k_weights: [tokens, experts of a token], float.
        order: [pairs], which pair each row is.

    Returns:
        [tokens, hidden], contiguous, in the dtype of `rows`.
    """
    (pairs, width), (tokens, per_token) = rows.shape, top_k_weights.shape
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if not out.numel() or not pairs:
        return out.zero_()
    inverse = torch.empty(pairs, dtype=torch.int32, device=rows.device)
    launch(experts_inverse_kernel, (-(-pairs // SORT_WIDTH),), (order, inverse, SORT_WIDTH))
    choices = covering_power(per_token)
    columns = min(covering_power(width), max(1, BLOCK // choices))
    grid = (-(-width // columns), tokens)
    constants = (per_token, choices, columns)
    launch(experts_combine_kernel, grid, (rows, top_k_weights.reshape(-1), inverse, out, *constants))
    return out
