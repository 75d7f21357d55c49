"""Before: x * cos + cat(-x[half:], x[:half]) * sin of one tensor whose heads stand beside the token.
After:  one rotary_embedding_single.
Applies to [batch, length, heads, head_dim] with cos and sin as wide as the head.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, unequal


@guard
def tables_fit_the_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if x.dim() != 4 or cos.dim() != 3:
        return f"x and cos have {x.dim()} and {cos.dim()} dimensions, not 4 and 3"
    batch, length, _, width = x.shape
    if cos.shape[0] not in (1, batch) or tuple(cos.shape[1:]) != (length, width):
        return f"cos is {list(cos.shape)}, not one row for each position of x {list(x.shape)}"
    return unequal(cos=cos, sin=sin)
