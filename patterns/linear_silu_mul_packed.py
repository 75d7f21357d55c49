"""Before: a linear, two slices of its result, silu of the first, mul with the second.
After:  one linear_silu_mul_packed.
Applies where the slices are the two halves of the last dimension.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


def unfit(weight: torch.Tensor) -> str | None:
    """Why a weight is no packed gate and up projection."""
    return f"the weight has {weight.shape[0]} rows, which are not two halves" if weight.shape[0] % 2 else None


@guard
def weight_has_two_halves(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    return unfit(weight)
