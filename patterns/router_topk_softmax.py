"""Before: topk, softmax of the values.
After:  one router_topk_softmax with two results.
Applies to [tokens, experts].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling

SHAPES = {"logits": ("tokens", "E")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/granitemoe/modeling_granitemoe.py#L113-L132"
)
def in_float32(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits become float32 first, and the weights are rounded at the end."""
    best, index = torch.topk(logits.float(), k, dim=-1)
    return torch.softmax(best, dim=-1).to(logits.dtype), index
