"""Before: sigmoid, plus a bias, the two best of each group added up, all but the best groups masked, topk; the sigmoids
        of the chosen, divided by their sum, times a factor.
After:  one router_sigmoid_groups with two results.
Applies to [tokens, experts] and one bias for each expert.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling

SHAPES = {"logits": ("tokens", "X")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/beam/modeling_beam.py#L350-L374"
)
def without_factor(
    logits: torch.Tensor, bias: torch.Tensor, kept: int, groups: int, k: int, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor is 1, or stands after the experts."""
    scores = torch.sigmoid(logits.float())
    ranks, size = scores + bias, logits.shape[-1] // groups
    worth = ranks.view(-1, groups, size).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(worth, kept, dim=-1)[1]
    opened = torch.zeros_like(worth).scatter(1, best, 1).unsqueeze(-1).expand(-1, groups, size)
    ranks = ranks.masked_fill(~opened.reshape(-1, logits.shape[-1]).bool(), float("-inf"))
    index = torch.topk(ranks, k, dim=-1)[1]
    weights = scores.gather(-1, index)
    return weights / (weights.sum(dim=-1, keepdim=True) + eps), index
