"""Before: x32 * silu(gate32), in groups of columns times rsqrt(mean of squares + eps), times the weight, cast.
After:  one gated_rms_norm_fp32.
Applies to [batch, length, hidden] and groups of up to 16384 columns; the gate has the shape of what is normalised.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .gated_rms_norm import unfit

SHAPES = {"hidden_states": ("...", "H"), "gate": ("...", "H")}


@guard
def groups_fit(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> str | None:
    return unfit(hidden_states, groups)
