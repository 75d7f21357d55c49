"""Before: two linears of one input, gelu (tanh form) of the first, mul with the second.
After:  one linear_gelu_tanh_mul.
Applies where both weights have the same shape and no bias.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .linear_silu_mul import unfit


@guard
def weights_are_alike(input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> str | None:
    return unfit(gate_weight, up_weight)
