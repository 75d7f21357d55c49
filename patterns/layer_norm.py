"""Before: aten.layer_norm over the last dimension.
After:  one layer_norm.
Applies to any leading shape; weight and bias must be one value for each column.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of


@guard
def scale_and_offset_are_rows(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> str | None:
    return not_a_row_of(hidden_states, weight=weight, bias=bias)
