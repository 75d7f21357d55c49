"""What stands around the products of routed experts, in cuTile, for prompts, and experts with any gate:

    experts_rows      the rows of all pairs of a token and an expert, sorted by expert
    experts_combine   y[t] = sum over k of w[t, k] * row of pair (t, k)

A pair is a token with one of its experts, numbered t * K + k. `experts_sort_kernel` sorts pairs by expert, keeping
their order: a block for each expert counts the pairs of smaller experts, which gives its place, and then writes its
own pairs there. No block waits. A last block puts pairs whose expert there is not behind all others. To sum, the
order is turned round first, so that a block finds the K rows of its token; sums are in float32.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

#: Pairs that one step of the sort looks at.
SORT_WIDTH = 1024
#: Elements of one block, and its most columns.
BLOCK, MAX_COLUMNS = 4096, 1024

Int = ct.Constant[int]


@ct.kernel
def experts_sort_kernel(index, order, ends, WIDTH: Int):
    expert = ct.bid(0)
    steps = ct.num_tiles(index, 0, (WIDTH,))
    lane = ct.arange(WIDTH, dtype=ct.int32)
    before = ct.zeros((WIDTH,), ct.int32)
    own = ct.zeros((WIDTH,), ct.int32)
    for step in range(steps):
        ids = ids_at(index, step * WIDTH + lane)
        before = before + ct.where((ids >= 0) & (ids < expert), 1, 0)
        own = own + ct.where(ids == expert, 1, 0)
    place = ct.sum(before)
    ct.scatter(ends, expert, place + ct.sum(own))
    for step in range(steps):
        pair = step * WIDTH + lane
        ids = ids_at(index, pair)
        nobody = ((ids < 0) | (ids >= ends.shape[0])) & (pair < index.shape[0])
        count = ct.where((ids == expert) | (nobody & (expert == ends.shape[0])), 1, 0)
        after = ct.cumsum(count)
        target = ct.where(count == 1, place + after - 1, index.shape[0])  # others are outside and dropped
        ct.scatter(order, target, ct.astype(pair, order.dtype))
        place = place + ct.sum(count)


def ids_at(index, pair):
    """Expert of each pair, -1 beyond the last."""
    return ct.gather(index, pair, padding_value=-1)


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


def pair_numbers(token, per_token, choices, outside):
    """The pairs of a token, [choices]; `outside` where there is none."""
    choice = ct.arange(choices, dtype=ct.int32)
    return ct.where(choice < per_token, token * per_token + choice, outside)


def rows_of_pairs(rows, row, column):
    """These columns of some rows, [choices, columns] in float32; 0 where there is none."""
    place = (ct.reshape(row, (row.shape[0], 1)), ct.reshape(column, (1, column.shape[0])))
    return ct.astype(ct.gather(rows, place), ct.float32)


def weights_of_pairs(weights, pair, is_there):
    """[choices, 1] in float32; 0 where there is no row, which times infinity would not be 0."""
    weight = ct.where(is_there, ct.astype(ct.gather(weights, pair), ct.float32), 0.0)
    return ct.reshape(weight, (pair.shape[0], 1))


@ct.kernel
def experts_combine_kernel(rows, weights, inverse, out, PER_TOKEN: Int, CHOICES: Int, COLUMNS: Int):
    token, column = ct.bid(0), ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
    pair = pair_numbers(token, PER_TOKEN, CHOICES, inverse.shape[0])
    row = ct.gather(inverse, pair, padding_value=rows.shape[0])
    weight = weights_of_pairs(weights, pair, row < rows.shape[0])
    total = ct.sum(rows_of_pairs(rows, row, column) * weight, axis=0)
    ct.scatter(out, (token, column), ct.astype(total, out.dtype))


def sort_pairs(top_k_index: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
    """Sorts at least one pair.

    Args:
        top_k_index: [tokens, experts of a token], integers.
        order: [pairs], integers, to be filled: which pair stands there.
        ends: [experts], int32, to be filled: for each expert the place after its last.
    """
    launch(experts_sort_kernel, (ends.shape[0] + 1,), (top_k_index.reshape(-1), order, ends, SORT_WIDTH))


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
        sort_pairs(top_k_index, order, ends)
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
    pairs = rows.shape[0]
    inverse = torch.empty(pairs, dtype=torch.int32, device=rows.device)
    if rows.numel():
        launch(experts_inverse_kernel, (-(-pairs // SORT_WIDTH),), (order, inverse, SORT_WIDTH))
    return combine(rows, top_k_weights, inverse)


def combine(rows: torch.Tensor, top_k_weights: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """`experts_combine` by the row of each pair, [pairs] int32; a pair whose row there is not adds nothing."""
    width, (tokens, per_token) = rows.shape[1], top_k_weights.shape
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if not out.numel() or not inverse.numel():
        return out.zero_()
    choices = covering_power(per_token)
    columns = min(covering_power(width), max(1, BLOCK // choices))
    grid = (tokens, -(-width // columns))
    args = (rows, top_k_weights.reshape(-1), inverse, out, per_token, choices, columns)
    launch(experts_combine_kernel, grid, args)
    return out
