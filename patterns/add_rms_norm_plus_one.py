"""Before: x = residual + hidden_states, kept; cast((1 + weight) * x32 * rsqrt(mean(x32²) + eps)).
After:  one add_rms_norm_plus_one with two results.
Applies where both addends have the same shape and the weight is one value for each column.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of, unequal


@guard
def addends_have_one_shape(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> str | None:
    rows = not_a_row_of(hidden_states, weight=weight)
    return unequal(hidden_states=hidden_states, residual=residual) or rows
