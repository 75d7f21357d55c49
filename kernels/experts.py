"""Routed experts in cuTile: y[t] = sum over k of w[t, k] * down[e] (act(gate[e] x[t]) * up[e] x[t]), e = index[t, k].

Four launches. A pair is a token with one of its experts, numbered t * K + k.

1. `experts_sort_kernel` sorts the pairs by expert, keeping their order: a block for each expert counts the pairs
   of smaller experts, which gives its place, and then writes its own pairs there. No block waits for another.
2. `experts_gate_up_kernel` multiplies the rows of one expert with both of its projections, gathering tokens by
   pair, and writes act(gate) * up, rows in sorted order.
3. `experts_down_kernel` multiplies those with the down projection, times the pair's weight, and scatters the
   rows back to the pairs' own places.
4. `experts_sum_kernel` sums the K rows of each token in float32.

A grid cannot depend on how many pairs an expert has, so a product has S / ROWS + E blocks along the rows, for S
pairs, and each finds its expert and rows from the counts; those that find none end at once. Sums over K are in
float32; act(gate) * up and each weighted row are rounded to the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

#: Pairs that one step of the sort looks at.
SORT_WIDTH = 1024
#: Columns that one block of the last sum covers.
SUM_WIDTH = 1024
LATENCY = 10
LOG2_E = 1.4426950408889634

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]


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
        mine = ids_at(index, pair) == expert
        count = ct.where(mine, 1, 0)
        after = ct.cumsum(count)
        target = ct.where(mine, place + after - 1, index.shape[0])  # others are outside and dropped
        ct.scatter(order, target, pair)
        place = place + ct.sum(count)


def ids_at(index, pair):
    """Expert of each pair, -1 beyond the last."""
    return ct.astype(ct.gather(index, pair, padding_value=-1), ct.int32)


def own_rows(ends, block, rows, EXPERTS):
    """Expert of a block of rows, and the first and the last of its rows; the expert is EXPERTS for none."""
    lane = ct.arange(EXPERTS, dtype=ct.int32)
    stop = ct.gather(ends, lane, padding_value=0)
    start = ct.where(lane == 0, 0, ct.gather(ends, ct.maximum(lane - 1, 0), padding_value=0))
    blocks = ct.where(lane < ends.shape[0], (stop - start + rows - 1) // rows, 0)
    through = ct.cumsum(blocks)
    expert = ct.sum(ct.where(through <= block, 1, 0))
    chosen = lane == expert
    first = ct.sum(ct.where(chosen, start + (block - through + blocks) * rows, 0))
    last = ct.sum(ct.where(chosen, stop, 0))
    return expert, first, last


@ct.kernel
def experts_gate_up_kernel(
    x, weight, order, ends, out, ACT: Int, PER_TOKEN: Int, EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int
):  # fmt: skip
    expert, first, last = own_rows(ends, ct.bid(0), ROWS, EXPERTS)
    if expert < EXPERTS:
        column = ct.bid(1)
        half = out.shape[1]
        row = first + ct.arange(ROWS, dtype=ct.int32)
        pair = ct.gather(order, ct.where(row < last, row, order.shape[0]), padding_value=-1)
        token = ct.where(pair >= 0, pair // PER_TOKEN, x.shape[0])
        token = ct.reshape(token, (ROWS, 1))
        lane = ct.reshape(ct.arange(DEPTH, dtype=ct.int32), (1, DEPTH))
        gates, ups = weight.slice(1, 0, half), weight.slice(1, half, 2 * half)
        gate = ct.zeros((ROWS, COLUMNS), ct.float32)
        up = ct.zeros((ROWS, COLUMNS), ct.float32)
        for k in range(ct.cdiv(x.shape[1], DEPTH)):
            left = ct.gather(x, (token, k * DEPTH + lane))
            gate = ct.mma(left, weight_tile(gates, expert, k, column, (DEPTH, COLUMNS)), gate)
            up = ct.mma(left, weight_tile(ups, expert, k, column, (DEPTH, COLUMNS)), up)
        opened = ct.astype(ct.astype(activation(gate, ACT), out.dtype), ct.float32)
        result = ct.astype(opened * ct.astype(ct.astype(up, out.dtype), ct.float32), out.dtype)
        ct.store(out.slice(0, first, last), (0, column), result)


def weight_tile(weight, expert, k, column, shape):
    """A tile of one expert's matrix [out, in], as [in, out]."""
    shape3 = (1, shape[0], shape[1])
    tile = ct.load(weight, (expert, k, column), shape3, order=(0, 2, 1), padding_mode=ZERO, latency=LATENCY)
    return ct.reshape(tile, shape)


def activation(x, kind):
    """SiLU (0) or GELU by tanh (1): x / (1 + exp(-z))."""
    z = x if kind == 0 else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + ct.exp2(-z * LOG2_E))


@ct.kernel
def experts_down_kernel(
    x, weight, order, ends, pair_weight, out, EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int
):  # fmt: skip
    expert, first, last = own_rows(ends, ct.bid(0), ROWS, EXPERTS)
    if expert < EXPERTS:
        column = ct.bid(1)
        rows = x.slice(0, first, last)
        sums = ct.zeros((ROWS, COLUMNS), ct.float32)
        for k in range(ct.cdiv(x.shape[1], DEPTH)):
            left = ct.load(rows, (0, k), (ROWS, DEPTH), padding_mode=ZERO)
            sums = ct.mma(left, weight_tile(weight, expert, k, column, (DEPTH, COLUMNS)), sums)
        row = first + ct.arange(ROWS, dtype=ct.int32)
        pair = ct.gather(order, ct.where(row < last, row, order.shape[0]), padding_value=out.shape[0])
        factor = ct.reshape(ct.astype(ct.gather(pair_weight, pair), ct.float32), (ROWS, 1))
        lane = ct.reshape(column * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
        ct.scatter(out, (ct.reshape(pair, (ROWS, 1)), lane), ct.astype(sums * factor, out.dtype))


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


def _cover(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


@cache
def _hinted(kernel: ct.kernel, occupancy: int) -> ct.kernel:
    return kernel.replace_hints(occupancy=occupancy)


def _experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act: int,
) -> torch.Tensor:
    tokens, hidden = hidden_states.shape
    per_token, count, inner = top_k_index.shape[1], down_proj.shape[0], down_proj.shape[2]
    pairs = tokens * per_token
    options = {"dtype": hidden_states.dtype, "device": hidden_states.device}
    out = torch.empty(tokens, hidden, **options)
    if not out.numel() or not pairs:
        return out.zero_()
    scratch = torch.empty(pairs + count, dtype=torch.int32, device=hidden_states.device)
    order, ends = scratch[:pairs], scratch[pairs:]
    launch(experts_sort_kernel, (count,), (top_k_index.reshape(-1), order, ends, SORT_WIDTH))
    tiling = pick_tiling(pairs, count, hidden_states.itemsize)
    blocks = min(pairs, pairs // tiling.rows + min(pairs, count))
    cut = (_cover(count), tiling.rows, tiling.columns, tiling.depth)
    gated = torch.empty(pairs, inner, **options)
    grid = (blocks, -(-inner // tiling.columns))
    args = (hidden_states, gate_up_proj, order, ends, gated, act, per_token, *cut)
    launch(_hinted(experts_gate_up_kernel, tiling.occupancy), grid, args)
    rows = torch.empty(pairs, hidden, **options)
    grid = (blocks, -(-hidden // tiling.columns))
    weights = top_k_weights.reshape(-1)
    launch(_hinted(experts_down_kernel, tiling.occupancy), grid, (gated, down_proj, order, ends, weights, rows, *cut))
    width = min(SUM_WIDTH, _cover(hidden))
    launch(experts_sum_kernel, (-(-hidden // width), tokens), (rows, out, per_token, width))
    return out


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
    return _experts(hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, 0)
