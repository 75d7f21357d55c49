"""Before: aten.linear with bias (addmm and Conv1D included).
After:  one linear_bias.
Applies to a 2-D weight in any strides and a bias with one value for each output feature.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def bias_is_a_row(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions, not 2"
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        return f"the bias has shape {list(bias.shape)}, not one value for each of {weight.shape[0]} features"
    return None
