"""Before: for q and for k: the first columns rotated by neighbouring pairs, cat with the rest.
After:  one rotary_embedding_interleaved_partial with two results.
Applies to [batch, heads, length, head_dim] with cos and sin of [batch, 1, length, rotated columns], or to [batch,
length, heads, head_dim] with [batch, length, 1, rotated columns].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, unequal

SHAPES = {"q": None, "k": None, "cos": None, "sin": None}


@guard
def tables_fit_the_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 4:
        return f"q, k and cos have {q.dim()}, {k.dim()} and {cos.dim()} dimensions, not 4"
    batch, outer, inner, width = q.shape
    heads_first = tuple(cos.shape[1:3]) == (1, inner)
    fits = heads_first or tuple(cos.shape[1:3]) == (outer, 1)
    if cos.shape[0] not in (1, batch) or not fits or cos.shape[3] > width:
        return f"cos is {list(cos.shape)}, not a row for some columns of each position of q {list(q.shape)}"
    shared = (batch, inner, width) if heads_first else (batch, outer, width)
    if (k.shape[0], k.shape[2 if heads_first else 1], k.shape[3]) != shared:
        return f"q is {list(q.shape)} but k is {list(k.shape)}"
    return unequal(cos=cos, sin=sin)
