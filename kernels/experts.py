"""Routed experts in cuTile, for each token t with its experts e = index[t, k] and their weights w[t, k]:

    y[t] = sum over k of w[t, k] * down[e] (act(gate[e] x[t]) * up[e] x[t])

`experts_clamped` has biases, gate and up columns interleaved, and (clamp(up) + 1) * gate * sigmoid(alpha *
gate) with gate = min(gate, limit) in the middle.

Four launches. A pair is a token with one of its experts, numbered t * K + k.

1. `experts_sort_kernel` sorts the pairs by expert, keeping their order: a block for each expert counts the
   pairs of smaller experts, which gives its place, and then writes its own pairs there. No block waits. A last
   block puts pairs whose expert there is not behind all others.
2. `experts_gate_up_kernel` multiplies the rows of one expert with both of its projections, gathering tokens
   by pair, and writes act(gate) * up, rows in sorted order.
   (`experts_clamped_gate_kernel` splits interleaved columns after the product.)
3. `experts_down_kernel` multiplies those with the down projection, times the pair's weight, and scatters the
   rows back to the pairs' own places.
4. `experts_sum_kernel` sums the K rows of each token in float32.

A grid cannot depend on how many pairs an expert has, so a product has S / ROWS + E blocks along the rows,
for S pairs, and each finds its expert and tile of rows from the counts; those that find none do nothing. Tiles begin
at multiples of ROWS, whoever's rows these are: so the sorted rows are loaded whole, by bulk copies, and only the rows
of the block's own expert are written. Sums over K are in float32; act(gate) * up and each weighted row are rounded to
the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, with_hints

#: Pairs that one step of the sort looks at.
SORT_WIDTH = 1024
#: Columns that one block of the last sum covers.
SUM_WIDTH = 1024
LATENCY = 10
LOG2_E = 1.4426950408889634

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@dataclass(frozen=True)
class Tiling:
    """How a grouped product is cut: rows of one expert, columns of the result, and steps along the sum."""

    rows: int
    columns: int
    depth: int
    occupancy: int


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
    return ct.astype(ct.gather(index, pair, padding_value=-1), ct.int32)


def own_tile(ends, block, rows, EXPERTS):
    """Expert of a block, its tile of rows, and the first row and the one after the last that are the expert's.

    Tiles are counted from row 0, so that they can be loaded whole; one in which an expert ends and another begins is
    the tile of two blocks. For a block without rows all is 0.
    """
    lane = ct.arange(EXPERTS, dtype=ct.int32)
    stop = ct.gather(ends, lane, padding_value=0)
    start = ct.where(lane == 0, 0, ct.gather(ends, ct.maximum(lane - 1, 0), padding_value=0))
    blocks = ct.where((lane < ends.shape[0]) & (start < stop), (stop + rows - 1) // rows - start // rows, 0)
    through = ct.cumsum(blocks)
    expert = ct.sum(ct.where(through <= block, 1, 0))
    expert = ct.where(expert < EXPERTS, expert, 0)
    chosen = (lane == expert) & (through > block)
    tile = ct.sum(ct.where(chosen, start // rows + block - through + blocks, 0))
    first = ct.maximum(ct.sum(ct.where(chosen, start, 0)), tile * rows)
    last = ct.minimum(ct.sum(ct.where(chosen, stop, 0)), (tile + 1) * rows)
    return expert, tile, first, last


def most_blocks(rows, experts, tile):
    """How many blocks `own_tile` may find rows for: each tile once, and once more for every expert after the first."""
    return min(rows, -(-rows // tile) + max(0, min(rows, experts) - 1))


@ct.kernel
def experts_gate_up_kernel(
    x, weight, order, ends, out, ACT: Int, PER_TOKEN: Int, EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int
):  # fmt: skip
    expert, tile, first, last = own_tile(ends, ct.bid(0), ROWS, EXPERTS)
    column = ct.bid(1)
    row = row_numbers(tile, first, last, ROWS, out.shape[0])
    token = own_tokens(order, row, PER_TOKEN, x.shape[0])
    lane = ct.reshape(ct.arange(DEPTH, dtype=ct.int32), (1, DEPTH))
    gate = ct.zeros((ROWS, COLUMNS), ct.float32)
    up = ct.zeros((ROWS, COLUMNS), ct.float32)
    for k in range(steps_of(first, last, x.shape[1], DEPTH)):
        left = ct.gather(x, (token, k * DEPTH + lane))
        gate = ct.mma(left, half_tile(weight, expert, 0, k, column, (DEPTH, COLUMNS)), gate)
        up = ct.mma(left, half_tile(weight, expert, 1, k, column, (DEPTH, COLUMNS)), up)
    opened = ct.astype(ct.astype(activation(gate, ACT), out.dtype), ct.float32)
    result = ct.astype(opened * ct.astype(ct.astype(up, out.dtype), ct.float32), out.dtype)
    put_rows(out, row, column, result)


def steps_of(first, last, width, depth):
    """Steps along the sum, none for a block without rows.

    So such a block runs through a loop of no steps: with the whole product inside an `if`, and rows and halves of
    weights cut out by slices, these kernels never ended on an H200 (CTK 13.4.92).
    """
    return ct.where(first < last, ct.cdiv(width, depth), 0)


def half_tile(weight, expert, half, k, column, shape):
    """A tile [in, out] of the gate (0) or the up projection (1) of one expert, [experts, 2, out, in]."""
    place, shape4 = (expert, half, k, column), (1, 1, shape[0], shape[1])
    return ct.reshape(ct.load(weight, place, shape4, order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY), shape)


def own_tokens(order, row, per_token, outside):
    """Token of each row, [rows, 1]; `outside` where there is none."""
    pair = ct.gather(order, row, padding_value=-1)
    return ct.reshape(ct.where(pair >= 0, pair // per_token, outside), (row.shape[0], 1))


def row_numbers(tile, first, last, rows, outside):
    """The rows of a tile, [rows]; `outside` before `first` and from `last` on."""
    row = tile * rows + ct.arange(rows, dtype=ct.int32)
    return ct.where((first <= row) & (row < last), row, outside)


def put_rows(out, row, column, tile):
    """Writes a tile to the rows whose numbers are given, those beyond the last left out."""
    rows, columns = tile.shape
    lane = column * columns + ct.arange(columns, dtype=ct.int32)
    ct.scatter(out, (ct.reshape(row, (rows, 1)), ct.reshape(lane, (1, columns))), tile)


def weight_tile(weight, expert, k, column, shape, out_first):
    """A tile [in, out] of one expert's matrix, which is stored [out, in] or [in, out]."""
    shape3, place = (1, shape[0], shape[1]), (expert, k, column)
    if out_first:
        tile = ct.load(weight, place, shape3, order=(0, 2, 1), padding_mode=ZERO, latency=LATENCY)
    else:
        tile = ct.load(weight, place, shape3, padding_mode=ZERO, latency=LATENCY)
    return ct.reshape(tile, shape)


@ct.kernel
def experts_clamped_gate_kernel(
    x, weight, bias, order, ends, out, alpha, limit,
    PER_TOKEN: Int, EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int,
):  # fmt: skip
    expert, tile, first, last = own_tile(ends, ct.bid(0), ROWS, EXPERTS)
    column = ct.bid(1)
    row = row_numbers(tile, first, last, ROWS, out.shape[0])
    token = own_tokens(order, row, PER_TOKEN, x.shape[0])
    lane = ct.reshape(ct.arange(DEPTH, dtype=ct.int32), (1, DEPTH))
    both = ct.zeros((ROWS, 2 * COLUMNS), ct.float32)
    for k in range(steps_of(first, last, x.shape[1], DEPTH)):
        left = ct.gather(x, (token, k * DEPTH + lane))
        both = ct.mma(left, weight_tile(weight, expert, k, column, (DEPTH, 2 * COLUMNS), False), both)
    both = both + ct.astype(ct.load(bias, (expert, column), (1, 2 * COLUMNS), padding_mode=ZERO), ct.float32)
    both = ct.reshape(both, (ROWS, COLUMNS, 2))
    is_gate = ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 2)) == 0
    gate = ct.minimum(ct.sum(ct.where(is_gate, both, 0.0), axis=2), limit, propagate_nan=True)
    up = ct.minimum(ct.sum(ct.where(is_gate, 0.0, both), axis=2), limit, propagate_nan=True)
    up = ct.maximum(up, -limit, propagate_nan=True)
    opened = gate / (1.0 + ct.exp2(gate * (-alpha * LOG2_E)))
    put_rows(out, row, column, ct.astype((up + 1.0) * opened, out.dtype))


def activation(x, kind):
    """SiLU (0) or GELU by tanh (1): x / (1 + exp(-z))."""
    z = x if kind == 0 else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + ct.exp2(-z * LOG2_E))


def grouped_product(x, tile, steps, weight, expert, column, rows, shape, out_first):
    """A tile of x times tiles of one expert's matrix, [depth, columns] each, summed over the steps."""
    sums = ct.zeros((rows, shape[1]), ct.float32)
    for k in range(steps):
        left = ct.load(x, (tile, k), (rows, shape[0]), padding_mode=ZERO)
        sums = ct.mma(left, weight_tile(weight, expert, k, column, shape, out_first), sums)
    return sums


@ct.kernel
def experts_down_kernel(
    x, weight, bias, order, ends, pair_weight, out,
    OUT_FIRST: Flag, BIAS: Flag, EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int,
):  # fmt: skip
    expert, tile, first, last = own_tile(ends, ct.bid(0), ROWS, EXPERTS)
    column = ct.bid(1)
    steps = steps_of(first, last, x.shape[1], DEPTH)
    sums = grouped_product(x, tile, steps, weight, expert, column, ROWS, (DEPTH, COLUMNS), OUT_FIRST)
    if BIAS:
        sums = sums + ct.astype(ct.load(bias, (expert, column), (1, COLUMNS), padding_mode=ZERO), ct.float32)
    row = row_numbers(tile, first, last, ROWS, x.shape[0])
    pair = ct.gather(order, row, padding_value=out.shape[0])
    factor = ct.reshape(ct.astype(ct.gather(pair_weight, pair), ct.float32), (ROWS, 1))
    put_rows(out, pair, column, ct.astype(sums * factor, out.dtype))


@ct.kernel
def experts_sum_kernel(rows, out, PER_TOKEN: Int, WIDTH: Int):
    column, token = ct.bid(0), ct.bid(1)
    total = ct.zeros((1, WIDTH), ct.float32)
    for k in range(PER_TOKEN):
        tile = ct.load(rows, (token * PER_TOKEN + k, column), (1, WIDTH), padding_mode=ZERO)
        total = total + ct.astype(tile, ct.float32)
    ct.store(out, (token, column), ct.astype(total, out.dtype))


@cache
def pick_tiling(pairs: int, experts: int, itemsize: int) -> Tiling:
    """A tiling for the rows that an expert has on average."""
    average = pairs / experts
    if itemsize == 4:
        return Tiling(16, 32, 32, 2) if average <= 16 else Tiling(64, 32, 16, 2)
    if average <= 16:
        return Tiling(16, 64, 128, 2)
    return Tiling(64, 64, 64, 2) if average <= 64 else Tiling(128, 64, 64, 1)


class _Pass:
    """What the launches of one call share: the sorted pairs and the cut of the products."""

    def __init__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, count: int, inner: int) -> None:
        self.tokens, self.hidden = hidden_states.shape
        self.per_token = top_k_index.shape[1]
        self.pairs = self.tokens * self.per_token
        device = hidden_states.device
        self.out = torch.empty(self.tokens, self.hidden, dtype=hidden_states.dtype, device=device)
        self.gated = torch.empty(self.pairs, inner, dtype=hidden_states.dtype, device=device)
        scratch = torch.empty(self.pairs + count, dtype=torch.int32, device=device)
        self.order, self.ends = scratch[: self.pairs], scratch[self.pairs :]
        if self.out.numel() and self.pairs:
            launch(experts_sort_kernel, (count + 1,), (top_k_index.reshape(-1), self.order, self.ends, SORT_WIDTH))
            self.tiling = tiling = pick_tiling(self.pairs, count, hidden_states.itemsize)
            self.blocks = most_blocks(self.pairs, count, tiling.rows)
            self.cut = (covering_power(count), tiling.rows, tiling.columns, tiling.depth)

    def grid(self, columns: int) -> tuple[int, int]:
        return self.blocks, -(-columns // self.tiling.columns)

    def finish(
        self, weights: torch.Tensor, down: torch.Tensor, bias: torch.Tensor | None, out_first: bool
    ) -> torch.Tensor:
        """The down projection and the sum over the experts of each token."""
        rows = torch.empty(self.pairs, self.hidden, dtype=self.out.dtype, device=self.out.device)
        extra = down if bias is None else bias  # a kernel takes no None; it does not read this
        launch(
            with_hints(experts_down_kernel, self.tiling.occupancy), self.grid(self.hidden),
            (
                self.gated, down, extra, self.order, self.ends, weights.reshape(-1), rows,
                out_first, bias is not None, *self.cut,
            ),
        )  # fmt: skip
        width = min(SUM_WIDTH, covering_power(self.hidden))
        grid = (-(-self.hidden // width), self.tokens)
        launch(experts_sum_kernel, grid, (rows, self.out, self.per_token, width))
        return self.out


def experts_silu(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of down[e] (silu(gate[e] x) * up[e] x) over the experts e of each token.

    Args:
        hidden_states: [tokens, hidden], float32, float16 or bfloat16.
        top_k_index: [tokens, experts of a token], integers from 0 to experts - 1.
        top_k_weights: [tokens, experts of a token], the dtype of `hidden_states` or float32.
        gate_up_proj: [experts, 2 * inner, hidden], the rows of gate first.
        down_proj: [experts, hidden, inner].

    Returns:
        [tokens, hidden], contiguous, in the dtype of `hidden_states`.
    """
    return _gated(hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, 0)


def experts_gelu_tanh(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> torch.Tensor:
    """`experts_silu` with the tanh form of GELU on the gate."""
    return _gated(hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, 1)


def _gated(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    act: int
) -> torch.Tensor:  # fmt: skip
    count, _, inner = down.shape
    work = _Pass(x, index, count, inner)
    if not work.out.numel() or not work.pairs or not inner:
        return work.out.zero_()
    halves = gate_up.unflatten(1, (2, inner))
    args = (x, halves, work.order, work.ends, work.gated, act, work.per_token, *work.cut)
    launch(with_hints(experts_gate_up_kernel, work.tiling.occupancy), work.grid(inner), args)
    return work.finish(weights, down, None, True)


def experts_clamped(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Weighted sum of down[e] ((clamp(u) + 1) * g * sigmoid(alpha * g)) over the experts e of each token.

    u and g are the up and gate projections of the token with their biases, g at most `limit`.

    Args:
        hidden_states: [tokens, hidden], float32, float16 or bfloat16.
        top_k_index: [tokens, experts of a token], integers from 0 to experts - 1.
        top_k_weights: [tokens, experts of a token], the dtype of `hidden_states` or float32.
        gate_up_proj: [experts, hidden, 2 * inner], gate in the even columns and up in the odd ones.
        gate_up_proj_bias: [experts, 2 * inner], likewise.
        down_proj: [experts, inner, hidden].
        down_proj_bias: [experts, hidden].
        alpha: Steepness of the gate.
        limit: What up is clamped to on both sides, and gate from above.

    Returns:
        [tokens, hidden], contiguous, in the dtype of `hidden_states`.
    """
    count, inner, _ = down_proj.shape
    work = _Pass(hidden_states, top_k_index, count, inner)
    if not work.out.numel() or not work.pairs:
        return work.out.zero_()
    arrays = (hidden_states, gate_up_proj, gate_up_proj_bias, work.order, work.ends, work.gated)
    args = (*arrays, alpha, limit, work.per_token, *work.cut)
    launch(with_hints(experts_clamped_gate_kernel, work.tiling.occupancy), work.grid(inner), args)
    return work.finish(top_k_weights, down_proj, down_proj_bias, False)
