"""Before: two linears of one input, silu of the first, mul with the second.
After:  one linear_silu_mul.
Applies where both weights have the same shape and no bias.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, unequal


def unfit(gate_weight: torch.Tensor, up_weight: torch.Tensor) -> str | None:
    """Why two weights are no gate and up projection."""
    if gate_weight.dim() != 2:
        return f"the weight has {gate_weight.dim()} dimensions, not 2"
    return unequal(gate_weight=gate_weight, up_weight=up_weight)


@guard
def weights_are_alike(input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> str | None:
    return unfit(gate_weight, up_weight)
