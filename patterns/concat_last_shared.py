"""Before: the second array expanded to every head, then cat((a, b), dim=-1) of two arrays of four dimensions.
After:  one concat_last_shared.
Applies to arrays of one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def one_dtype(a: torch.Tensor, b: torch.Tensor) -> str | None:
    return None if a.dtype == b.dtype else f"a is {a.dtype} and b {b.dtype}"
