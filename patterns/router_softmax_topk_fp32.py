"""Before: float32 softmax, topk.
After:  one router_softmax_topk_fp32 with two results.
Applies to [tokens, experts].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/deepseek_v2/modeling_deepseek_v2.py#L86-L117"
)
def in_any_order(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts need not be sorted."""
    shares, index = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), k, dim=-1, sorted=False)
    return shares, index


@guard
def logits_are_a_matrix(logits: torch.Tensor, k: int) -> str | None:
    return None if logits.dim() == 2 else f"the logits have {logits.dim()} dimensions, not 2"
