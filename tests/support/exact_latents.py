"""What attention over latents gives in float64; :mod:`exact` for the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from exact import ROUNDED32, Rounding, attend, exact


@exact("latent_attention_masked")
def _latent_attention(
    r: Rounding, name: str, q_nope: Any, q_pe: Any, latents: Any, k_pe: Any, kv_weight: Any, mask: Any, scale: float
) -> Any:
    """Tolerance: that of attention, and beside it keys and values are rounded where they are expanded."""
    heads, width = q_nope.shape[1], q_nope.shape[3]

    def expand(latents: Any, kv_weight: Any) -> Any:
        return (latents[:, 0] @ kv_weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)

    size = expand(latents.abs(), kv_weight.abs())
    expanded = expand(latents, kv_weight)
    error = r.relative * expanded.abs() + latents.shape[3] * ROUNDED32 * size + r.step
    k = torch.cat((expanded[..., :width], k_pe.expand(-1, heads, -1, -1)), -1)
    v = expanded[..., width:]
    bias = torch.where(mask, 0.0, -math.inf).double() if mask.dtype == torch.bool else mask
    q = torch.cat((q_nope, q_pe), -1)
    ((value, tolerance),) = attend(r, q, k, v, bias, scale)
    weights = torch.softmax(scale * q @ k.mT + bias, -1)
    of_scores = torch.where(bias > -1e4, scale * q_nope.abs() @ error[..., :width].mT, 0.0).amax(-1, keepdim=True)
    spread = torch.expm1(2 * of_scores)
    own = spread * (weights @ v.abs()) + (1 + spread) * (weights @ error[..., width:])
    return ((value, (1 + spread.transpose(1, 2)) * tolerance + own.transpose(1, 2)),)
