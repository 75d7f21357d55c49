"""Query, key and value projections in one cuTile launch, with biases or without; one projection after a norm.

    q, k, v = n Wq^T, n Wk^T, n Wv^T        n is x, or the RMS norm of x times a weight

For decode steps: three weights are read as if they were one, so that the GPU drains and fills up once, and
narrow keys and values do not leave it half empty. A block picks its weight and its result by its number, then
runs one loop for all. One row and more have kernels of their own, and the norm is folded into the former, as
gated_linear.py describes; so is what it does for overlap.

With more than QKV_ROWS rows the products are launches of their own (linear.py): each fills the GPU alone.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .gated_linear import (
    RMS_PLUS_ONE,
    ZERO,
    Int,
    Norm,
    Tiling,
    best_tiling,
    candidates,
    finished,
    hinted,
    norm_arguments,
    row_tile,
    split_norm,
    weight_rows,
)
from .linear import CANDIDATES as OF_LINEAR
from .linear import Flag, _unit_stride, linear, linear_bias, product

#: Up to so many rows q, k and v are one launch.
QKV_ROWS = 64

#: From so many features on, a vocabulary, a row is normed apart too: its product is faster on the matrix units.
APART_FEATURES = 8192

#: What `python -m tilegym_fx.tune` tries.
CANDIDATES = {**OF_LINEAR, "qkv_linear": candidates, "normed_linear": candidates}

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pick(column, q_tiles, k_tiles, q, k, v):
    """Which tile of which of three products a block computes: its column there, weight, bias and result."""
    if column < q_tiles:
        weight, bias, out = q
    elif column < q_tiles + k_tiles:
        column = column - q_tiles
        weight, bias, out = k
    else:
        column = column - q_tiles - k_tiles
        weight, bias, out = v
    return column, weight, bias, out


def row_product(x, norm_weight, weight, column, eps, norm, hidden, features, depth):
    """[1, FEATURES]: a row, normed where NORM says so, times one tile of a weight."""
    squares = ct.zeros((1, depth), ct.float32)
    products = ct.zeros((features, depth), ct.float32)
    for k in range(ct.cdiv(x.shape[1], depth)):
        left, squares = row_tile(x, norm_weight, k, squares, depth, norm)
        products = products + weight_rows(weight, column, k, (features, depth)) * left
    return finished(products, squares, hidden, eps, norm)


def store_sums(sums, bias, out, row, column, has_bias):
    """One tile of a result, with its bias."""
    if has_bias:
        added = ct.astype(ct.load(bias, (column,), (sums.shape[1],), padding_mode=ZERO), ct.float32)
        sums = sums + ct.reshape(added, (1, sums.shape[1]))
    ct.store(out, (row, column), ct.astype(sums, out.dtype))


@ct.kernel
def normed_gemv_kernel(x, norm_weight, weight, out, eps, NORM: Int, HIDDEN: Int, FEATURES: Int, DEPTH: Int):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column = ct.bid(0)
    sums = row_product(x, norm_weight, weight, column, eps, NORM, HIDDEN, FEATURES, DEPTH)
    store_sums(sums, weight, out, 0, column, False)


@ct.kernel
def qkv_gemv_kernel(
    x, norm_weight, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q, k, v, eps,
    NORM: Int, HIDDEN: Int, BIAS: Flag, Q_TILES: Int, K_TILES: Int, FEATURES: Int, DEPTH: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column = ct.bid(0)
    column, weight, bias, out = pick(
        column, Q_TILES, K_TILES, (q_weight, q_bias, q), (k_weight, k_bias, k), (v_weight, v_bias, v)
    )
    sums = row_product(x, norm_weight, weight, column, eps, NORM, HIDDEN, FEATURES, DEPTH)
    store_sums(sums, bias, out, 0, column, BIAS)


@ct.kernel
def qkv_gemm_kernel(
    x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q, k, v,
    BIAS: Flag, Q_TILES: Int, K_TILES: Int, ROWS: Int, FEATURES: Int, DEPTH: Int, SWAP: Flag,
):  # fmt: skip
    ct.grid_dependency_control_wait()
    column, row = ct.bid(0), ct.bid(1)
    column, weight, bias, out = pick(
        column, Q_TILES, K_TILES, (q_weight, q_bias, q), (k_weight, k_bias, k), (v_weight, v_bias, v)
    )
    shape = (ROWS, FEATURES, DEPTH)
    sums = product(x, weight, row, column, 0, ct.cdiv(x.shape[1], DEPTH), shape, 0, SWAP)
    store_sums(sums, bias, out, row, column, BIAS)


def _qkv(x: torch.Tensor, weights: Weights, biases: Weights | None = None, norm: Norm | None = None) -> Weights:
    lead = x.shape[:-1]
    weights = _unit_stride(weights[0]), _unit_stride(weights[1]), _unit_stride(weights[2])
    x, norm = split_norm(x, norm, weights[0])
    is_whole = x.numel() and min(w.shape[0] for w in weights)
    if not is_whole or x.shape[0] > QKV_ROWS or len({w.stride().index(1) for w in weights}) > 1:
        x = x if norm is None else norm(x)
        outs = _separate(x, weights, biases)
    else:
        outs = tuple(torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device) for w in weights)
        tiling = best_tiling("qkv_linear", x, weights[0], sum(w.shape[0] for w in weights))
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
    """Fill outs, three of [rows, features], cut as `tiling` says; only one row may have a norm."""
    tiles = [-(-out.shape[1] // tiling.features) for out in outs]
    arrays = (*weights, *(weights if biases is None else biases), *outs)
    constants = (biases is not None, *tiles[:2])
    shape = (tiling.features, tiling.depth)
    if tiling.rows == 1:
        args = (*norm_arguments(x, norm, *arrays), *constants, *shape)
        return launch(hinted(qkv_gemv_kernel, tiling), (sum(tiles),), args)
    grid = (sum(tiles), -(-x.shape[0] // tiling.rows))
    launch(hinted(qkv_gemm_kernel, tiling), grid, (x, *arrays, *constants, tiling.rows, *shape, tiling.swap))


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
    weight = _unit_stride(weight)
    x, norm = split_norm(hidden_states, Norm(norm_weight, eps), weight)
    if norm is not None and features >= APART_FEATURES:
        x, norm = norm(x), None
    if norm is None:
        return linear(x, weight).view(*lead, features)
    out = torch.empty((1, features), dtype=x.dtype, device=x.device)
    if out.numel():
        run_normed(x, norm, weight, out, best_tiling("normed_linear", x, weight, features))
    return out.view(*lead, features)


def run_normed(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor, out: torch.Tensor, tiling: Tiling
) -> None:  # fmt: skip
    """Fill out [1, features], cut as `tiling` says."""
    args = (*norm_arguments(x, norm, weight, out), tiling.features, tiling.depth)
    launch(hinted(normed_gemv_kernel, tiling), (-(-out.shape[1] // tiling.features),), args)
