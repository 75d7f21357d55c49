"""Before: a grouped product of rows that are sorted by expert.
After:  one grouped_linear.
Applies to rows of [rows, in] in the dtype of the matrices, which may be transposed views.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def rows_and_matrices_fit(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> str | None:
    if input.dim() != 2 or weight.dim() != 3 or ends.dim() != 1:
        return f"input, weight and ends have {input.dim()}, {weight.dim()} and {ends.dim()} dimensions, not 2, 3 and 1"
    return None if input.dtype == weight.dtype else f"the rows are {input.dtype} and the matrices {weight.dtype}"
