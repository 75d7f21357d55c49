"""Before: bmm of rows with a contiguous stack of matrices.
After:  one batched_linear.
Applies where the matrices are contiguous: keys of attention, transposed, are not.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def matrices_are_contiguous(input: torch.Tensor, weight: torch.Tensor) -> str | None:
    return None if weight.is_contiguous() else "the matrices are not contiguous"
