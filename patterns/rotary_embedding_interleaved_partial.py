"""Before: for q and for k: the first columns rotated by neighbouring pairs, cat with the rest.
After:  one rotary_embedding_interleaved_partial with two results.
Applies to [batch, heads, length, head_dim] with cos and sin of [batch, 1, length, rotated columns].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, unequal


@guard
def tables_fit_the_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 4:
        return f"q, k and cos have {q.dim()}, {k.dim()} and {cos.dim()} dimensions, not 4"
    batch, _, length, width = q.shape
    if k.shape[0] != batch or tuple(k.shape[2:]) != (length, width):
        return f"q is {list(q.shape)} but k is {list(k.shape)}"
    if cos.shape[0] not in (1, batch) or tuple(cos.shape[1:3]) != (1, length) or cos.shape[3] > width:
        return f"cos is {list(cos.shape)}, not a row for some columns of each position of q {list(q.shape)}"
    return unequal(cos=cos, sin=sin)
