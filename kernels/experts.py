"""Routed experts in cuTile, for each token t with its experts e = index[t, k] and their weights w[t, k]:

    y[t] = sum over k of w[t, k] * down[e] (act(gate[e] x[t]) * up[e] x[t])

Four launches. A pair is a token with one of its experts, numbered t * K + k.

1. `experts_sort_kernel` sorts the pairs by expert, keeping their order (experts_parts.py).
2. `experts_gate_up_kernel` multiplies the rows of one expert with both of its projections, gathering tokens
   by pair, and writes act(gate) * up, rows in sorted order.
3. `experts_down_kernel` multiplies those with the down projection, times the pair's weight, and scatters the
   rows back to the pairs' own places.
4. `experts_sum_kernel` sums the K rows of each token in float32.

Products are cut into blocks as grouped_linear.py says. Sums over K are in float32; act(gate) * up and each weighted
row are rounded to the model's dtype.

Prompts. With more than 16 rows an expert on average, in a dtype of 2 bytes, experts_prompt.py takes over: larger tiles,
which belong to one expert each.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .activation import LOG2_E
from .experts_parts import sort_pairs
from .experts_prompt import APART, Prompt, has_many_rows
from .grouped_linear import (
    LATENCY,
    ZERO,
    grouped_product,
    most_blocks,
    own_tile,
    pick_tiling,
    put_rows,
    row_numbers,
    steps_of,
    tiled,
)

#: Columns that one block of the last sum covers.
SUM_WIDTH = 1024

Int = ct.Constant[int]
Flag = ct.Constant[bool]


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


def half_tile(weight, expert, half, k, column, shape):
    """A tile [in, out] of the gate (0) or the up projection (1) of one expert, [experts, 2, out, in]."""
    place, shape4 = (expert, half, k, column), (1, 1, shape[0], shape[1])
    return ct.reshape(ct.load(weight, place, shape4, order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY), shape)


def own_tokens(order, row, per_token, outside):
    """Token of each row, [rows, 1]; `outside` where there is none."""
    pair = ct.gather(order, row, padding_value=-1)
    return ct.reshape(ct.where(pair >= 0, pair // per_token, outside), (row.shape[0], 1))


def activation(x, kind):
    """SiLU (0) or GELU by tanh (1): x / (1 + exp(-z))."""
    z = x if kind == 0 else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + ct.exp2(-z * LOG2_E))


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
    token, column = ct.bid(0), ct.bid(1)
    total = ct.zeros((1, WIDTH), ct.float32)
    for k in range(PER_TOKEN):
        tile = ct.load(rows, (token * PER_TOKEN + k, column), (1, WIDTH), padding_mode=ZERO)
        total = total + ct.astype(tile, ct.float32)
    ct.store(out, (token, column), ct.astype(total, out.dtype))


class Pass:
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
            sort_pairs(top_k_index, self.order, self.ends)
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
            tiled(experts_down_kernel, self.tiling), self.grid(self.hidden),
            (
                self.gated, down, extra, self.order, self.ends, weights.reshape(-1), rows,
                out_first, bias is not None, *self.cut,
            ),
        )  # fmt: skip
        width = min(SUM_WIDTH, covering_power(self.hidden))
        grid = (self.tokens, -(-self.hidden // width))
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
    if inner and has_many_rows(index.numel(), x, count):
        prompt = Prompt(x, index, count)
        opened = prompt.product(prompt.rows, gate_up.unflatten(1, (2, inner)), None, kind=APART + act)
        return prompt.sum(prompt.product(opened, down, None), weights)
    work = Pass(x, index, count, inner)
    if not work.out.numel() or not work.pairs or not inner:
        return work.out.zero_()
    halves = gate_up.unflatten(1, (2, inner))
    args = (x, halves, work.order, work.ends, work.gated, act, work.per_token, *work.cut)
    launch(tiled(experts_gate_up_kernel, work.tiling), work.grid(inner), args)
    return work.finish(weights, down, None, True)
