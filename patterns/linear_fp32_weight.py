"""Before: rows to float32, aten.linear without bias and with a float32 weight.
After:  one linear_fp32_weight that reads the rows in 16 bits.
Applies to a 2-D float32 weight; rows that are float32 already are a linear.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def only_the_weight_is_wide(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    if input.dtype == torch.float32 or weight.dtype != torch.float32:
        return f"the rows are {input.dtype} and the weight is {weight.dtype}"
    return None
