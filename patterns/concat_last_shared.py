"""Before: the second array expanded to every head, then cat((a, b), dim=-1) of two arrays of four dimensions.
After:  one concat_last_shared.
Applies to arrays of one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def both_are_heads(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dim() != 4 or b.dim() != 4:
        return f"a and b have {a.dim()} and {b.dim()} dimensions, not 4"
    return None if a.dtype == b.dtype else f"a is {a.dtype} and b {b.dtype}"
