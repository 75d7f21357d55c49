"""Before: an RMS norm, then two linears that alone read it, silu of the first, mul.
After:  one rms_norm_linear_silu_mul.
Applies where both weights have the same shape and no bias.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .rms_norm_linear import unlike


@guard
def one_dtype(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
) -> str | None:
    return unlike(hidden_states, gate_weight)
