"""Before: rows and weight to float32, aten.linear without bias.
After:  one linear_fp32 that reads both in 16 bits.
Applies to a 2-D weight in the dtype of the rows; what is float32 already is a linear.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def operands_are_narrow(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    if input.dtype == torch.float32:
        return "the rows are float32 already: that is a linear"
    if input.dtype != weight.dtype:
        return f"the rows are {input.dtype} and the weight is {weight.dtype}"
    return None
