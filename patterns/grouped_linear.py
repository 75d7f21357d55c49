"""Before: a grouped product of rows that are sorted by expert.
After:  one grouped_linear.
Applies to rows of [rows, in] in the dtype of the matrices, which may be transposed views.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

#: Sizes need no common divisor, which only grouped products of 16 bits want.
SHAPES = {"input": ("rows", "columns"), "weight": ("E", "columns", "features")}


@guard
def one_dtype(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> str | None:
    return None if input.dtype == weight.dtype else f"the rows are {input.dtype} and the matrices {weight.dtype}"
