"""Before: aten.linear without bias, then add to the residual.
After:  one linear_add.
Applies where the residual has the shape of the projected rows: a bias that is added by hand is refused.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def residual_fits_the_output(input: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> str | None:
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions, not 2"
    expected = [*input.shape[:-1], weight.shape[0]]
    if list(residual.shape) != expected:
        return f"a residual of {list(residual.shape)} would be broadcast to {expected}"
    return None
