"""Before: scores through softcap * tanh(x / softcap), mask added, float32 softmax, times v.
After:  one softcap_attention_masked that reads every key head once.
Applies to [batch, heads, length, head_dim] with a mask that is added and shared by all heads.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"mask": ("1 or B", "One", "S", "T"), "v": ("B", "Hk", "T", "V")}


@guard
def mask_is_added(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
