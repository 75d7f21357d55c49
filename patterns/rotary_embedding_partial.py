"""Before: for q and for k: the first columns rotated by halves, cat with the columns that pass through.
After:  one rotary_embedding_partial with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the rotated columns.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"cos": ("1 or B", "S", "R"), "sin": ("1 or B", "S", "R")}


@guard
def tables_are_no_wider(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if cos.shape[-1] > q.shape[-1]:
        return f"the tables turn {cos.shape[-1]} columns, and a head has {q.shape[-1]}"
    return None
