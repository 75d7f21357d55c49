"""Query, key and value projections in one cuTile launch, with biases or without; one projection after a norm.

    q, k, v = n Wq^T, n Wk^T, n Wv^T        n is x, or the RMS norm of x times a weight

For decode steps: three weights are read as if they were one, so that the GPU drains and fills up once, and
narrow keys and values do not leave it half empty. A block picks its weight and its result by its number, then
runs one loop for all. The norm is folded in as gated_linear.py describes, and so is what it does for overlap.

With more than QKV_ROWS rows the products are launches of their own (linear.py): each fills the GPU alone.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .gated_linear import (
    RMS_PLUS_ONE,
    ZERO,
    Flag,
    Int,
    Norm,
    Tiling,
    choose_tiling,
    hinted,
    norm_arguments,
    row_scale,
    row_tile,
    split_norm,
    weight_rows,
    weight_tile,
)
from .linear import _processors, _unit_stride, linear, linear_bias

#: Up to so many rows q, k and v are one launch.
QKV_ROWS = 64

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def project(x, norm_weight, weight, bias, out, row, column, eps, norm, hidden, has_bias, shape, tma):
    """One tile of the rows times one weight; `shape` is (ROWS, FEATURES, DEPTH)."""
    rows, features, depth = shape
    squares = ct.zeros((rows, depth), ct.float32)
    if rows == 1:
        products = ct.zeros((features, depth), ct.float32)
        for k in range(ct.cdiv(x.shape[1], depth)):
            left, squares = row_tile(x, norm_weight, row, k, squares, (1, depth), norm, ct.float32)
            products = products + weight_rows(weight, column, k, (features, depth), tma) * left
        sums = ct.reshape(ct.sum(products, axis=1), (1, features))
    else:
        sums = ct.zeros((rows, features), ct.float32)
        for k in range(ct.cdiv(x.shape[1], depth)):
            left, squares = row_tile(x, norm_weight, row, k, squares, (rows, depth), norm, x.dtype)
            sums = ct.mma(left, weight_tile(weight, k, column, (depth, features)), sums)
    sums = sums * row_scale(squares, hidden, eps, norm)
    if has_bias:
        added = ct.astype(ct.load(bias, (column,), (features,), padding_mode=ZERO), ct.float32)
        sums = sums + ct.reshape(added, (1, features))
    ct.store(out, (row, column), ct.astype(sums, out.dtype))


@ct.kernel
def normed_linear_kernel(
    x, norm_weight, weight, out, eps, NORM: Int, HIDDEN: Int, ROWS: Int, FEATURES: Int, DEPTH: Int, TMA: Flag
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column, row = ct.bid(0), ct.bid(1)
    shape = (ROWS, FEATURES, DEPTH)
    project(x, norm_weight, weight, weight, out, row, column, eps, NORM, HIDDEN, False, shape, TMA)


@ct.kernel
def qkv_linear_kernel(
    x, norm_weight, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q, k, v, eps,
    NORM: Int, HIDDEN: Int, BIAS: Flag, Q_TILES: Int, K_TILES: Int,
    ROWS: Int, FEATURES: Int, DEPTH: Int, TMA: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column, row = ct.bid(0), ct.bid(1)
    if column < Q_TILES:
        weight, bias, out = q_weight, q_bias, q
    elif column < Q_TILES + K_TILES:
        column = column - Q_TILES
        weight, bias, out = k_weight, k_bias, k
    else:
        column = column - Q_TILES - K_TILES
        weight, bias, out = v_weight, v_bias, v
    shape = (ROWS, FEATURES, DEPTH)
    project(x, norm_weight, weight, bias, out, row, column, eps, NORM, HIDDEN, BIAS, shape, TMA)


def _qkv(x: torch.Tensor, weights: Weights, biases: Weights | None = None, norm: Norm | None = None) -> Weights:
    lead = x.shape[:-1]
    x, norm = split_norm(x, norm)
    weights = _unit_stride(weights[0]), _unit_stride(weights[1]), _unit_stride(weights[2])
    if x.shape[0] > QKV_ROWS or len({w.stride().index(1) for w in weights}) > 1:
        x = x if norm is None else norm(x)
        outs = _separate(x, weights, biases)
    else:
        outs = tuple(torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device) for w in weights)
        if x.numel() and min(w.shape[0] for w in weights):
            features = sum(w.shape[0] for w in weights)
            tiling = choose_tiling(
                x.shape[0], features, has_norm=norm is not None,
                itemsize=x.itemsize, processors=_processors(x.device),
            )  # fmt: skip
            run_qkv(x, norm, weights, biases, outs, tiling)
    q, k, v = (out.view(*lead, out.shape[-1]) for out in outs)
    return q, k, v


def _separate(x: torch.Tensor, weights: Weights, biases: Weights | None) -> tuple[torch.Tensor, ...]:
    if biases is None:
        return tuple(linear(x, weight) for weight in weights)
    return tuple(linear_bias(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def run_qkv(
    x: torch.Tensor, norm: Norm | None, weights: Weights, biases: Weights | None,
    outs: tuple[torch.Tensor, ...], tiling: Tiling,
) -> None:  # fmt: skip
    """Fill outs, three of [rows, features], cut as `tiling` says."""
    tiles = [-(-out.shape[1] // tiling.features) for out in outs]
    arrays = (*weights, *(weights if biases is None else biases), *outs)
    args = (*norm_arguments(x, norm, *arrays), biases is not None, *tiles[:2])
    grid = (sum(tiles), -(-x.shape[0] // tiling.rows))
    launch(hinted(qkv_linear_kernel, tiling), grid, (*args, *tiling.shape, tiling.tma))


def linear_qkv(input: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor) -> Weights:
    """Three projections of `input` [..., K] by weights [features, K] of its dtype; each is contiguous."""
    return _qkv(input, (q_weight, k_weight, v_weight))


def linear_qkv_bias(
    input: torch.Tensor,
    q_weight: torch.Tensor, q_bias: torch.Tensor,
    k_weight: torch.Tensor, k_bias: torch.Tensor,
    v_weight: torch.Tensor, v_bias: torch.Tensor,
) -> Weights:  # fmt: skip
    """`linear_qkv` plus a bias [features] each, added in float32 before the rounding."""
    return _qkv(input, (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias))


def rms_norm_linear_qkv(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor,
) -> Weights:  # fmt: skip
    """`linear_qkv` of the RMS norm of `hidden_states` times `norm_weight` [K]."""
    return _qkv(hidden_states, (q_weight, k_weight, v_weight), norm=Norm(norm_weight, eps))


def rms_norm_linear_qkv_bias(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    q_weight: torch.Tensor, q_bias: torch.Tensor,
    k_weight: torch.Tensor, k_bias: torch.Tensor,
    v_weight: torch.Tensor, v_bias: torch.Tensor,
) -> Weights:  # fmt: skip
    """`linear_qkv_bias` of the RMS norm of `hidden_states` times `norm_weight` [K]."""
    weights, biases = (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias)
    return _qkv(hidden_states, weights, biases, Norm(norm_weight, eps))


def rms_norm_plus_one_linear_qkv(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor,
) -> Weights:  # fmt: skip
    """`linear_qkv` of the RMS norm of `hidden_states` times 1 + `norm_weight` [K]."""
    return _qkv(hidden_states, (q_weight, k_weight, v_weight), norm=Norm(norm_weight, eps, RMS_PLUS_ONE))


def rms_norm_linear(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> torch.Tensor:
    """The RMS norm of `hidden_states` times `norm_weight` [K], times `weight` [features, K] transposed."""
    lead, features = hidden_states.shape[:-1], weight.shape[0]
    x, norm = split_norm(hidden_states, Norm(norm_weight, eps))
    if norm is None:
        return linear(x, weight).view(*lead, features)
    out = torch.empty((x.shape[0], features), dtype=x.dtype, device=x.device)
    if out.numel():
        tiling = choose_tiling(
            x.shape[0], features, has_norm=True, itemsize=x.itemsize, processors=_processors(x.device)
        )
        run_normed(x, norm, _unit_stride(weight), out, tiling)
    return out.view(*lead, features)


def run_normed(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor, out: torch.Tensor, tiling: Tiling
) -> None:  # fmt: skip
    """Fill out [rows, features], cut as `tiling` says."""
    grid = (-(-out.shape[1] // tiling.features), -(-x.shape[0] // tiling.rows))
    args = norm_arguments(x, norm, weight, out)
    launch(hinted(normed_linear_kernel, tiling), grid, (*args, *tiling.shape, tiling.tma))
