"""Before: sigmoid, plus a bias, topk; the sigmoids of the chosen, divided by their sum, times a factor.
After:  one router_sigmoid with two results.
Applies to [tokens, experts] and one bias for each expert.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling

SHAPES = {"logits": ("tokens", "E")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/step3p7/modeling_step3p7.py#L585-L594"
)
def shares_alone(
    logits: torch.Tensor, bias: torch.Tensor, k: int, eps: float = 0.0, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing is added to the sum, and the shares have no factor."""
    scores = torch.sigmoid(logits.float())
    index = torch.topk(scores + bias, k, dim=-1)[1]
    weights = scores.gather(-1, index)
    return weights / weights.sum(dim=-1, keepdim=True), index


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/hy_v3/modeling_hy_v3.py#L281-L297"
)
def without_factor(
    logits: torch.Tensor, bias: torch.Tensor, k: int, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The configured factor is 1."""
    scores = torch.sigmoid(logits.float())
    index = torch.topk(scores + bias, k, dim=-1)[1]
    weights = scores.gather(-1, index)
    return weights / (weights.sum(dim=-1, keepdim=True) + eps), index
