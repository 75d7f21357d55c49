"""Routed experts with biases and a clamped gate in cuTile, for each token t with its experts e = index[t, k]:

    y[t] = sum over k of w[t, k] * (down[e] ((clamp(up) + 1) * gate * sigmoid(alpha * gate)) + down_bias[e])

gate and up are columns by turns of gate_up[e] x[t] + gate_up_bias[e]; clamp keeps up within limit on both sides,
and gate is at most limit. The launches are those of experts.py, with `experts_clamped_gate_kernel` for the first
product, which splits the columns afterwards, and the last bias within the second.

Prompts. With more than 16 rows an expert on average, in a dtype of 2 bytes, experts_prompt.py takes over, which adds
the biases and opens the gate where a product ends. There gate and up are rounded to the model's dtype before the clamp,
as torch's own code rounds them.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .experts import Pass, own_tokens
from .experts_prompt import TURNS, Prompt, clamped_gate, has_many_rows
from .grouped_linear import LATENCY, ZERO, own_tile, put_rows, row_numbers, steps_of, tiled, weight_tile

Int = ct.Constant[int]


def halves(both):
    """Gate and up [rows, columns] of [rows, columns, 2]."""
    is_gate = ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 2)) == 0
    return ct.sum(ct.where(is_gate, both, 0.0), axis=2), ct.sum(ct.where(is_gate, 0.0, both), axis=2)


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
        both = ct.mma(left, weight_tile(weight, expert, k, column, (DEPTH, 2 * COLUMNS), False, LATENCY), both)
    both = both + ct.astype(ct.load(bias, (expert, column), (1, 2 * COLUMNS), padding_mode=ZERO), ct.float32)
    gate, up = halves(ct.reshape(both, (ROWS, COLUMNS, 2)))
    put_rows(out, row, column, ct.astype(clamped_gate(gate, up, alpha, limit), out.dtype))


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
    if inner and has_many_rows(top_k_index.numel(), hidden_states, count):
        prompt = Prompt(hidden_states, top_k_index, count)
        opened = prompt.product(
            prompt.rows, gate_up_proj, gate_up_proj_bias, kind=TURNS, out_first=False, alpha=alpha, limit=limit
        )
        return prompt.sum(prompt.product(opened, down_proj, down_proj_bias, out_first=False), top_k_weights)
    work = Pass(hidden_states, top_k_index, count, inner)
    if not work.out.numel() or not work.pairs:
        return work.out.zero_()
    arrays = (hidden_states, gate_up_proj, gate_up_proj_bias, work.order, work.ends, work.gated)
    args = (*arrays, alpha, limit, work.per_token, *work.cut)
    launch(tiled(experts_clamped_gate_kernel, work.tiling), work.grid(inner), args)
    return work.finish(top_k_weights, down_proj, down_proj_bias, False)
