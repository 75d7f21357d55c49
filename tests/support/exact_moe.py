"""Mixtures of experts in float64: routers, and experts with the products of one and of several kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from exact import FLOOR32, ROUNDED32, Rounding, exact


@exact(
    "router_softmax_topk", "router_softmax_topk_fp32", "router_softmax_topk_norm",
    "router_softmax_topk_norm_fp32", "router_topk_softmax",
)  # fmt: skip
def _router(r: Rounding, name: str, logits: Any, k: int) -> Any:
    best, index = torch.topk(logits, k, dim=-1)
    shares = torch.softmax(logits, -1).gather(-1, index)
    if "norm" in name:
        shares = shares / shares.sum(-1, keepdim=True)
    if name == "router_topk_softmax":
        shares = torch.softmax(best, -1)
    kind = Rounding.of(torch.float32) if "fp32" in name else r
    size = logits.abs().amax(-1, keepdim=True) + logits.shape[-1]
    return (shares, (kind.relative + 8 * ROUNDED32 * size) * shares + kind.step), (
        index,
        torch.zeros_like(index),
    )


@exact("router_sigmoid", "router_sigmoid_groups")
def _router_sigmoid(
    r: Rounding, name: str, logits: Any, bias: Any, k: int, eps: float, scale: float, kept: int = 1, groups: int = 1
) -> Any:
    scores = torch.sigmoid(logits)
    ranks = (scores + bias).unflatten(-1, (groups, -1))
    worth = torch.topk(ranks, min(2, ranks.shape[-1]), dim=-1)[0].sum(-1)
    best = torch.topk(worth, kept, dim=-1)[1]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
    ranks = ranks.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(-2)
    index = torch.topk(ranks, k, dim=-1)[1]
    chosen = scores.gather(-1, index)
    weights, order = (chosen / (chosen.sum(-1, keepdim=True) + eps) * scale).sort(-1, descending=True)
    index = index.gather(-1, order)
    return (weights, 32 * ROUNDED32 * weights + FLOOR32), (index, torch.zeros_like(index))


@exact("grouped_linear")
def _grouped_linear(r: Rounding, name: str, input: Any, weight: Any, ends: Any) -> Any:
    expert = torch.searchsorted(ends.long(), torch.arange(input.shape[0]), right=True)
    matrices = weight.transpose(-1, -2)[expert]
    value = (matrices @ input[:, :, None])[..., 0]
    size = (matrices.abs() @ input.abs()[:, :, None])[..., 0]
    return ((value, r.relative * value.abs() + (input.shape[1] + 2) * ROUNDED32 * size + r.step + FLOOR32),)


@exact("batched_linear")
def _batched_linear(r: Rounding, name: str, input: Any, weight: Any) -> Any:
    value, size = input @ weight, input.abs() @ weight.abs()
    return ((value, r.relative * value.abs() + (input.shape[-1] + 2) * ROUNDED32 * size + r.step + FLOOR32),)


@exact("experts_silu", "experts_silu_fp32")
def _experts_silu(
    r: Rounding,
    name: str,
    hidden_states: Any,
    top_k_index: Any,
    top_k_weights: Any,
    gate_up_proj: Any,
    down_proj: Any,
) -> Any:
    both, error = _projected(r, gate_up_proj[top_k_index], hidden_states[:, None])
    (gate, up), (gate_error, up_error) = both.chunk(2, -1), error.chunk(2, -1)
    opened = gate * torch.sigmoid(gate)
    gated, error = _product(r, opened, 1.1 * gate_error + r.relative * opened.abs(), up, up_error)
    return _combined(r, down_proj[top_k_index], gated, error, top_k_weights)


@exact("experts_clamped")
def _experts_clamped(
    r: Rounding, name: str, hidden_states: Any, top_k_index: Any, top_k_weights: Any,
    gate_up_proj: Any, gate_up_proj_bias: Any, down_proj: Any, down_proj_bias: Any, alpha: float, limit:
    float,
) -> Any:  # fmt: skip
    both, error = _projected(r, gate_up_proj[top_k_index].transpose(-1, -2), hidden_states[:, None])
    both = both + gate_up_proj_bias[top_k_index]
    error = error + r.relative * (both.abs() + limit)
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    slope = torch.sigmoid(alpha * gate)
    opened = gate * slope
    opened_error = 1.2 * error[..., ::2] + r.relative * (3 + abs(alpha) * gate.abs()) * opened.abs()
    gated, error = _product(r, opened, opened_error, up + 1, error[..., 1::2] + r.relative * (up + 1).abs())
    return _combined(
        r, down_proj[top_k_index].transpose(-1, -2), gated, error, top_k_weights, down_proj_bias[top_k_index]
    )


@exact("experts_rows")
def _experts_rows(r: Rounding, name: str, hidden_states: Any, top_k_index: Any, count: int) -> Any:
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    rows = hidden_states[order // top_k_index.shape[1]]
    ends = torch.bincount(expert, minlength=count).cumsum(0).int()
    return (rows, torch.full_like(rows, r.step)), (order, order * 0), (ends, ends * 0)


@exact("experts_combine")
def _experts_combine(r: Rounding, name: str, rows: Any, top_k_weights: Any, order: Any) -> Any:
    weighted = (
        torch.empty_like(rows).index_copy(0, order, rows).view(*top_k_weights.shape, -1) * top_k_weights[..., None]
    )
    out = weighted.sum(1)
    return ((out, r.relative * out.abs() + 16 * ROUNDED32 * weighted.abs().sum(1) + r.step + FLOOR32),)


def _projected(r: Rounding, weight: Any, x: Any) -> tuple[Any, Any]:
    """weight x, and how far one rounding and the float32 sum may lead from it."""
    value = (weight @ x[..., None]).squeeze(-1)
    size = (weight.abs() @ x.abs()[..., None]).squeeze(-1)
    return value, r.relative * value.abs() + x.shape[-1] * ROUNDED32 * size + r.step


def _product(r: Rounding, a: Any, a_error: Any, b: Any, b_error: Any) -> tuple[Any, Any]:
    value = a * b
    return value, a_error * (b.abs() + b_error) + a.abs() * b_error + r.relative * value.abs() + r.step


def _combined(r: Rounding, down: Any, gated: Any, error: Any, weights: Any, bias: Any = 0.0) -> Any:
    """The weighted sum over a token's experts: errors so far go through the down projection."""
    value, own = _projected(r, down, gated)
    value = value + bias
    error = own + (down.abs() @ error[..., None]).squeeze(-1) + r.relative * value.abs()
    weighted = value * weights[..., None]
    error = 1.01 * error * weights[..., None].abs() + r.relative * weighted.abs() + r.step
    out = weighted.sum(1)
    return ((out, error.sum(1) + r.relative * out.abs() + 8 * ROUNDED32 * weighted.abs().sum(1) + r.step),)
