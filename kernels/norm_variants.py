"""Norms without a weight or a bias, and RMSNorm with a gate, in cuTile.

    RMSNorm    n = x / sqrt(mean(x^2) + eps)
    L2 norm    n = x / sqrt(sum(x^2) + eps)
    L2 clip    n = x * min(limit / (sqrt(sum(x^2)) + eps), 1)
    LayerNorm  n = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)

    y = n, or n * weight, in float32 and rounded once; with a gate y = (weight * n, each step rounded) * silu(gate),
    the last product in float32 and rounded once.

Tiles are those of norm.py: a block owns OUTER x INNER whole rows and holds them as chunks of CHUNK columns. Rows
longer than MAX_HELD columns are read again for every pass.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .norm import MAX_HELD, _plan, from_mean, get, get_vector, inverse_root_mean, put, row_mean, squares

Int = ct.Constant[int]
Flag = ct.Constant[bool]


def distance(tile, mean, k, whole, hidden, center):
    """The tile, or its distance from the mean, in float32."""
    return from_mean(tile, mean, k, whole, hidden) if center else ct.astype(tile, ct.float32)


def row_scale(total, divisor, eps, limit, clipped):
    if clipped:
        length = ct.sqrt(ct.sum(total, axis=2, keepdims=True))
        return ct.minimum(limit / (length + eps), 1.0, propagate_nan=True)
    return inverse_root_mean(total, divisor, eps)


def finished(wide, scale, weight, gate, outer, inner, k, shape, fits, whole, weighted, gated, dtype):
    """Chunk k of the result, in float32."""
    norm = wide * scale
    if gated:
        norm = ct.astype(ct.astype(norm, dtype), ct.float32)
    if weighted:
        norm = norm * ct.astype(get_vector(weight, k, shape[2], whole), ct.float32)
    if gated:
        opened = ct.astype(get(gate, outer, inner, k, shape, fits), ct.float32)
        norm = ct.astype(ct.astype(norm, dtype), ct.float32) * (opened / (1.0 + ct.exp(-opened)))
    return norm


@ct.kernel
def norm_variant_kernel(
    x, weight, gate, out, eps, limit, CENTER: Flag, WEIGHTED: Flag, GATED: Flag, CLIPPED: Flag,
    DIVISOR: Int, HIDDEN: Int, OUTER: Int, INNER: Int, CHUNK: Int, ROWS_FIT: Flag,
):  # fmt: skip
    outer, inner, shape = ct.bid(0), ct.bid(1), (OUTER, INNER, CHUNK)
    total, spread = ct.zeros(shape, ct.float32), ct.zeros(shape, ct.float32)
    mean = ct.zeros((OUTER, INNER, 1), ct.float32)
    if HIDDEN <= MAX_HELD:
        row = ()
        for k in ct.static_iter(range(ct.cdiv(HIDDEN, CHUNK))):
            row += (get(x, outer, inner, k, shape, ROWS_FIT and (k + 1) * CHUNK <= HIDDEN),)
        if CENTER:
            for k in ct.static_iter(range(ct.cdiv(HIDDEN, CHUNK))):
                total = total + ct.astype(row[k], ct.float32)
            mean = row_mean(total, HIDDEN)
        for k in ct.static_iter(range(ct.cdiv(HIDDEN, CHUNK))):
            spread = spread + squares(distance(row[k], mean, k, (k + 1) * CHUNK <= HIDDEN, HIDDEN, CENTER))
        scale = row_scale(spread, DIVISOR, eps, limit, CLIPPED)
        for k in ct.static_iter(range(ct.cdiv(HIDDEN, CHUNK))):
            whole = (k + 1) * CHUNK <= HIDDEN
            fits = ROWS_FIT and whole
            wide = distance(row[k], mean, k, whole, HIDDEN, CENTER)
            result = finished(wide, scale, weight, gate, outer, inner, k, shape, fits, whole, WEIGHTED, GATED, x.dtype)
            put(out, outer, inner, k, result, fits)
    else:
        whole = HIDDEN % CHUNK == 0
        fits = ROWS_FIT and whole
        if CENTER:
            for k in range(ct.cdiv(HIDDEN, CHUNK)):
                total = total + ct.astype(get(x, outer, inner, k, shape, fits), ct.float32)
            mean = row_mean(total, HIDDEN)
        for k in range(ct.cdiv(HIDDEN, CHUNK)):
            tile = get(x, outer, inner, k, shape, fits)
            spread = spread + squares(distance(tile, mean, k, whole, HIDDEN, CENTER))
        scale = row_scale(spread, DIVISOR, eps, limit, CLIPPED)
        for k in range(ct.cdiv(HIDDEN, CHUNK)):
            wide = distance(get(x, outer, inner, k, shape, fits), mean, k, whole, HIDDEN, CENTER)
            result = finished(wide, scale, weight, gate, outer, inner, k, shape, fits, whole, WEIGHTED, GATED, x.dtype)
            put(out, outer, inner, k, result, fits)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    *,
    center: bool = False,
    summed: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """The norm that `center` (LayerNorm), `summed` (L2, its result float32) and `limit` (L2 clip) choose."""
    out = torch.empty(x.shape, dtype=torch.float32 if summed else x.dtype, device=x.device)
    if not out.numel():
        return out
    tensors = (x,) if gate is None else (x, gate)
    (rows, *others), grid, tile = _plan(*tensors)
    gates = others[0] if others else rows  # a kernel takes no None; it does not read these then
    scales = weight if weight is not None else rows
    flags = (center, weight is not None, gate is not None, limit is not None, 1 if summed else x.shape[-1])
    launch(norm_variant_kernel, grid, (rows, scales, gates, out.view(rows.shape), eps, limit or 0.0, *flags, *tile))
    return out


def rms_norm_unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of every row, computed in float32 and rounded once.

    Args:
        hidden_states: [..., hidden], any strides, float32, float16 or bfloat16; the result is contiguous.
        eps: Added to the mean square.
    """
    return _norm(hidden_states, None, None, eps)


def rms_norm_gated(hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * RMSNorm(hidden_states), times silu(gate).

    Args:
        hidden_states: [..., hidden], any strides, float32, float16 or bfloat16; the result is contiguous.
        gate: The same shape.
        weight: [hidden].
        eps: Added to the mean square.
    """
    return _norm(hidden_states, weight, gate, eps)


def layer_norm_no_bias(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of every row times `weight`, computed in float32 and rounded once; arguments as above."""
    return _norm(hidden_states, weight, None, eps, center=True)


def layer_norm_unweighted(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of every row, computed in float32 and rounded once; arguments as above."""
    return _norm(hidden_states, None, None, eps, center=True)


def l2_norm(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Every row divided by its length, in float32; `eps` is added to the sum of squares."""
    return _norm(hidden_states, None, None, eps, summed=True)


def l2_clip(hidden_states: torch.Tensor, threshold: float, eps: float) -> torch.Tensor:
    """Rows longer than `threshold` scaled down to it, computed in float32 and rounded once."""
    return _norm(hidden_states, None, None, eps, limit=threshold)
