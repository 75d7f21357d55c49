"""Before: an RMS norm scaled by one plus its weight, two linears that alone read it, gelu (tanh) of one, mul.
After:  one rms_norm_plus_one_linear_gelu_tanh_mul.
Applies where both weights have the same shape and no bias.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .linear_silu_mul import unfit
from .rms_norm_linear import unlike


@guard
def weights_are_alike(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
) -> str | None:
    return unfit(gate_weight, up_weight) or unlike(hidden_states, norm_weight, gate_weight)
