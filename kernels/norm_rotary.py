"""RMS norm of each query and key head, then the rotary embedding, in one cuTile launch.

    n = x / sqrt(mean(x^2) + eps) * weight                  over one head; weight or 1 + weight
    out[:half] = n[:half] * cos[:half] - n[half:] * sin[:half]
    out[half:] = n[half:] * cos[half:] + n[:half] * sin[half:]

Every step is rounded as in the separate ops (norm.py, rotary_embedding.py), whose tiles this kernel has: a
block takes HEADS heads at POSITIONS positions, both halves of a head apart, and blocks after the last group
of query heads take the keys. Queries and keys are read where the projection left them, [batch, positions,
heads, head_dim]; the results are [batch, heads, positions, head_dim]. In a decode step one launch of a few
microseconds takes the place of three.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .norm import CAST_FIRST, PLUS_ONE
from .rotary_embedding import _result_dtype, angle_tile, heads_tile, pick_tiles, product, put

Int = ct.Constant[int]


def weight_tile(weight, shape, whole):
    """Half of the norm's weight, to be broadcast over heads and positions."""
    if whole:
        tile = ct.load(weight, (0,), shape=(shape[3],), check_bounds=False, allow_tma=False)
    else:
        tile = ct.gather(weight, ct.arange(shape[3], dtype=ct.int32))
    return ct.reshape(tile, (1, 1, 1, shape[3]))


def scaled(tile, scale, factor, rounding):
    """Half of the normed heads, in the dtype of the heads."""
    norm = ct.astype(tile, ct.float32) * scale
    if rounding == PLUS_ONE:
        return ct.astype(norm * (1.0 + ct.astype(factor, ct.float32)), tile.dtype)
    return ct.astype(product(ct.astype(norm, tile.dtype), factor, tile.dtype), tile.dtype)


def norm_rotate(x, weight, cos, sin, out, eps, batch, group, position, half, shape, whole, rounding):
    low = heads_tile(x.slice(3, 0, half), batch, group, position, shape, whole)
    high = heads_tile(x.slice(3, half, 2 * half), batch, group, position, shape, whole)
    wide_low, wide_high = ct.astype(low, ct.float32), ct.astype(high, ct.float32)
    squares = ct.sum(wide_low * wide_low + wide_high * wide_high, axis=3, keepdims=True)
    scale = ct.rsqrt(squares * (0.5 / half) + eps)
    low = scaled(low, scale, weight_tile(weight.slice(0, 0, half), shape, whole), rounding)
    high = scaled(high, scale, weight_tile(weight.slice(0, half, 2 * half), shape, whole), rounding)
    cos_low = angle_tile(cos.slice(2, 0, half), batch, position, shape, whole)
    cos_high = angle_tile(cos.slice(2, half, 2 * half), batch, position, shape, whole)
    sin_low = angle_tile(sin.slice(2, 0, half), batch, position, shape, whole)
    sin_high = angle_tile(sin.slice(2, half, 2 * half), batch, position, shape, whole)
    first = product(low, cos_low, out.dtype) - product(high, sin_low, out.dtype)
    second = product(high, cos_high, out.dtype) + product(low, sin_high, out.dtype)
    put(out.slice(3, 0, half), batch, group, position, first, whole)
    put(out.slice(3, half, 2 * half), batch, group, position, second, whole)


def norm_rotate_block(x, weight, cos, sin, out, eps, group, half, shape, rounding):
    """The block's heads of one array, without bounds checks where the block lies inside of it."""
    position, batch = ct.bid(0), ct.bid(2)
    if shape[3] != half:
        norm_rotate(x, weight, cos, sin, out, eps, batch, group, position, half, shape, False, rounding)
    elif ((group + 1) * shape[1] <= out.shape[1]) & ((position + 1) * shape[2] <= out.shape[2]):
        norm_rotate(x, weight, cos, sin, out, eps, batch, group, position, half, shape, True, rounding)
    else:
        norm_rotate(x, weight, cos, sin, out, eps, batch, group, position, half, shape, False, rounding)


@ct.kernel
def norm_rotary_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps,
    ROUNDING: Int, HALF_DIM: Int, Q_GROUPS: Int, HEADS: Int, POSITIONS: Int, HALF: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    group = ct.bid(1)
    shape = (1, HEADS, POSITIONS, HALF)
    if group < Q_GROUPS:
        norm_rotate_block(q, q_weight, cos, sin, q_out, eps, group, HALF_DIM, shape, ROUNDING)
    else:
        norm_rotate_block(k, k_weight, cos, sin, k_out, eps, group - Q_GROUPS, HALF_DIM, shape, ROUNDING)


def _norm_rotated(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    cos: torch.Tensor, sin: torch.Tensor, rounding: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, positions, q_heads, dim = q.shape
    k_heads = k.shape[2]
    if cos.shape[0] != batch:
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    dtypes = _result_dtype(q, cos, True), _result_dtype(k, cos, True)
    q_out = torch.empty((batch, q_heads, positions, dim), dtype=dtypes[0], device=q.device)
    k_out = torch.empty((batch, k_heads, positions, dim), dtype=dtypes[1], device=k.device)
    if q_out.numel() and k_out.numel():
        tile = pick_tiles(q_heads, positions, dim // 2)
        q_groups, k_groups = -(-q_heads // tile[0]), -(-k_heads // tile[0])
        grid = (-(-positions // tile[1]), q_groups + k_groups, batch)
        arrays = q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos, sin, q_out, k_out
        launch(norm_rotary_kernel, grid, (*arrays, eps, rounding, dim // 2, q_groups, *tile))
    elif q_out.numel():
        q_out, _ = _norm_rotated(q, q, q_weight, q_weight, eps, cos, sin, rounding)
    elif k_out.numel():
        k_out, _ = _norm_rotated(k, k, k_weight, k_weight, eps, cos, sin, rounding)
    return q_out, k_out


def rms_norm_rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    cos: torch.Tensor, sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Norms each head, times its weight, and rotates it.

    Args:
        q: [batch, positions, heads, head_dim], any strides, float32, float16 or bfloat16; head_dim is even.
        k: [batch, positions, key heads, head_dim].
        q_weight: [head_dim], of the dtype of `q`.
        k_weight: [head_dim], of the dtype of `k`.
        eps: Added to the mean square of a head.
        cos: [batch or 1, positions, head_dim], both halves given.
        sin: Like `cos`.

    Returns:
        Queries [batch, heads, positions, head_dim] and keys, contiguous.
    """
    return _norm_rotated(q, k, q_weight, k_weight, eps, cos, sin, CAST_FIRST)


def rms_norm_plus_one_rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    cos: torch.Tensor, sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`rms_norm_rotary_embedding` with 1 + weight, in float32, in place of weight."""
    return _norm_rotated(q, k, q_weight, k_weight, eps, cos, sin, PLUS_ONE)
