"""Before: weight * cast(x32 * rsqrt(mean(x32²) + eps)), times silu(gate32), cast.
After:  one rms_norm_gated.
Applies to any leading shape; the gate has the shape of what is normalised.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of, unequal


@guard
def weight_is_a_row(hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    return not_a_row_of(hidden_states, weight=weight) or unequal(hidden_states=hidden_states, gate=gate)
