"""RMSNorm of gated values, group by group of columns, in cuTile.

    v = x * silu(gate)        y = weight * v / sqrt(mean of v^2 over the group + eps)

A block owns one group of one row and holds it in registers, in a tile of the next power of two columns, padded with
zeros. Where x has 16 bits the normalised value is rounded before the weight multiplies it, as its author does.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch


@ct.kernel
def gated_norm_kernel(x, gate, weight, out, eps, COLUMNS: ct.Constant[int], WIDTH: ct.Constant[int]):
    row, group = ct.bid(0), ct.bid(1)
    place, shape, zero = (row, group, 0), (1, 1, WIDTH), ct.PaddingMode.ZERO
    opened = ct.astype(ct.load(gate, place, shape=shape, padding_mode=zero), ct.float32)
    value = ct.astype(ct.load(x, place, shape=shape, padding_mode=zero), ct.float32)
    value = value * (opened / (1.0 + ct.exp(-opened)))
    mean = ct.sum(value * value, axis=2, keepdims=True) / COLUMNS
    norm = ct.astype(ct.astype(value * ct.rsqrt(mean + eps), x.dtype), ct.float32)
    scale = ct.astype(ct.load(weight, (group, 0), shape=(1, WIDTH), padding_mode=zero), ct.float32)
    ct.store(out, place, ct.astype(ct.reshape(scale, shape) * norm, out.dtype))


def _normed(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    columns = x.shape[-1] // groups
    rows = (-1, groups, columns)
    given = (x.reshape(rows), gate.reshape(rows), weight.view(groups, columns), out.view(rows), eps)
    width = 1 << (columns - 1).bit_length()
    launch(gated_norm_kernel, (given[0].shape[0], groups), (*given, columns, width))
    return out


def gated_rms_norm(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> torch.Tensor:
    """weight * RMSNorm(hidden_states * silu(gate)), each group of columns for itself.

    Args:
        hidden_states: [B, L, hidden], float32, float16 or bfloat16; the result is contiguous.
        gate: The same shape.
        weight: [hidden].
        eps: Added to the mean square.
        groups: How many groups of neighbouring columns there are.
    """
    return _normed(hidden_states, gate, weight, eps, groups, hidden_states.dtype)


def gated_rms_norm_fp32(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> torch.Tensor:
    """The same of float32 values, rounded once to the dtype of the gate."""
    return _normed(hidden_states, gate, weight, eps, groups, gate.dtype)
