"""Before: aten.linear without bias (matmul and Conv1D included).
After:  one linear.
Applies to a 2-D weight in any strides.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def weight_is_a_matrix(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    return None if weight.dim() == 2 else f"the weight has {weight.dim()} dimensions, not 2"
