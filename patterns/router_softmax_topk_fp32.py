"""Before: float32 softmax, topk.
After:  one router_softmax_topk_fp32 with two results.
Applies to [tokens, experts].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def logits_are_a_matrix(logits: torch.Tensor, k: int) -> str | None:
    return None if logits.dim() == 2 else f"the logits have {logits.dim()} dimensions, not 2"
