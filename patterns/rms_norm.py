"""Before: weight * cast(x32 * rsqrt(mean(x32²) + eps)), a node for each operation.
After:  one rms_norm.
Applies to any leading shape; the weight must be one value for each column.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of


@guard
def weight_is_a_row(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    return not_a_row_of(hidden_states, weight=weight)
