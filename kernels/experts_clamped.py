"""Routed experts with biases and a clamped gate in cuTile, for each token t with its experts e = index[t, k]:

    y[t] = sum over k of w[t, k] * (down[e] ((clamp(up) + 1) * gate * sigmoid(alpha * gate)) + down_bias[e])

gate and up are columns by turns of gate_up[e] x[t] + gate_up_bias[e]; clamp keeps up within limit on both sides,
and gate is at most limit. The launches are those of experts.py, with `experts_clamped_gate_kernel` for the first
product, which splits the columns afterwards, and the last bias within the second.

Prompts. In bfloat16, with more than 16 rows an expert on average, the products are torch's, which are the faster ones
there (`torch_groups` in grouped_linear.py decides; figures are there). What follows a product is a kernel:

    clamped_gate_kernel     (clamp(up) + 1) * gate / (1 + exp(-alpha * gate)), of the product's row + bias[e]
    biased_combine_kernel   y[t] = sum over k of w[t, k] * (row of pair (t, k) + bias[index[t, k]])

Their tiles. The gate takes 1024 columns of one row in a block, and so 2048 neighbouring elements of the product; a
row has one expert, whose bias is a tile of the same columns. The combine gathers the K rows of a token, and their
biases, by columns.

Precision. In a prompt a product is rounded to the model's dtype, as torch's own code rounds it. Bias, clamp and
gate are in float32 and rounded once, and so is the sum.
"""

from __future__ import annotations

import cuda.tile as ct
import torch
import torch.nn.functional as F

from tilegym_fx.launch import covering_power, launch

from .experts import LOG2_E, Pass, own_tokens
from .experts_parts import combined, experts_rows, pair_numbers, rows_of_pairs, weights_of_pairs
from .grouped_linear import ZERO, own_tile, put_rows, row_numbers, steps_of, tiled, torch_groups, weight_tile

#: Columns of the gate that one block covers.
GATE_WIDTH = 1024

Int = ct.Constant[int]


def clamped_gate(both, alpha, limit):
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate) of [rows, columns, 2], gate first of each two, in float32."""
    is_gate = ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 2)) == 0
    gate = ct.minimum(ct.sum(ct.where(is_gate, both, 0.0), axis=2), limit, propagate_nan=True)
    up = ct.minimum(ct.sum(ct.where(is_gate, 0.0, both), axis=2), limit, propagate_nan=True)
    up = ct.maximum(up, -limit, propagate_nan=True)
    return (up + 1.0) * (gate / (1.0 + ct.exp2(gate * (-alpha * LOG2_E))))


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
    gated = clamped_gate(ct.reshape(both, (ROWS, COLUMNS, 2)), alpha, limit)
    put_rows(out, row, column, ct.astype(gated, out.dtype))


@ct.kernel
def clamped_gate_kernel(both, bias, index, order, out, alpha, limit, WIDTH: Int):
    row, column = ct.bid(0), ct.bid(1)
    expert = ct.astype(ct.gather(index, ct.gather(order, row)), ct.int32)
    expert = ct.maximum(0, ct.minimum(expert, bias.shape[0] - 1))  # a row of no expert may hold anything
    sums = ct.astype(ct.load(both, (row, column), (1, 2 * WIDTH), padding_mode=ZERO), ct.float32)
    sums = sums + ct.astype(ct.load(bias, (expert, column), (1, 2 * WIDTH), padding_mode=ZERO), ct.float32)
    gated = clamped_gate(ct.reshape(sums, (1, WIDTH, 2)), alpha, limit)
    ct.store(out, (row, column), ct.astype(gated, out.dtype))


@ct.kernel
def biased_combine_kernel(
    rows, weights, inverse, out, bias, index, PER_TOKEN: Int, CHOICES: Int, COLUMNS: Int
):  # fmt: skip
    token, column = ct.bid(0), ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
    pair = pair_numbers(token, PER_TOKEN, CHOICES, inverse.shape[0])
    expert = ct.reshape(ct.astype(ct.gather(index, pair), ct.int32), (CHOICES, 1))
    added = ct.astype(ct.gather(bias, (expert, ct.reshape(column, (1, COLUMNS)))), ct.float32)
    values = rows_of_pairs(rows, inverse, pair, column) + added
    total = ct.sum(values * weights_of_pairs(weights, pair), axis=0)
    ct.scatter(out, (token, column), ct.astype(total, out.dtype))


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
    if torch_groups(top_k_index.numel(), hidden_states, gate_up_proj, down_proj):
        return _of_prompts(
            hidden_states, top_k_index, top_k_weights, gate_up_proj, gate_up_proj_bias, down_proj, down_proj_bias,
            alpha, limit,
        )  # fmt: skip
    count, inner, _ = down_proj.shape
    work = Pass(hidden_states, top_k_index, count, inner)
    if not work.out.numel() or not work.pairs:
        return work.out.zero_()
    arrays = (hidden_states, gate_up_proj, gate_up_proj_bias, work.order, work.ends, work.gated)
    args = (*arrays, alpha, limit, work.per_token, *work.cut)
    launch(tiled(experts_clamped_gate_kernel, work.tiling), work.grid(inner), args)
    return work.finish(top_k_weights, down_proj, down_proj_bias, False)


def _of_prompts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """`experts_clamped` with products of torch."""
    index = top_k_index.reshape(-1)
    rows, order, ends = experts_rows(hidden_states, top_k_index, gate_up.shape[0])
    both = F.grouped_mm(rows, gate_up, offs=ends)
    gated = torch.empty(both.shape[0], down.shape[1], dtype=both.dtype, device=both.device)
    width = min(GATE_WIDTH, covering_power(down.shape[1]))
    grid = (both.shape[0], -(-down.shape[1] // width))
    launch(clamped_gate_kernel, grid, (both, gate_up_bias, index, order, gated, alpha, limit, width))
    out = F.grouped_mm(gated, down, offs=ends)
    return combined(biased_combine_kernel, out, top_k_weights, order, down_bias, index)
