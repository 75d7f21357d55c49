"""Before: an RMS norm scaled by one plus its weight, two linears that alone read it, gelu (tanh) of one, mul.
After:  one rms_norm_plus_one_linear_gelu_tanh_mul.
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
