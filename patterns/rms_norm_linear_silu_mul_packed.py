"""Before: an RMS norm, a linear that alone reads it, two slices of the result, silu of the first, mul.
After:  one rms_norm_linear_silu_mul_packed.
Applies where the slices are the two halves of the last dimension.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .linear_silu_mul_packed import unfit
from .rms_norm_linear import unlike


@guard
def weight_has_two_halves(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> str | None:
    return unfit(weight) or unlike(hidden_states, weight)
