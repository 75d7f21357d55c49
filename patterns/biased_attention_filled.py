"""Before: divided products, scores set to a number where a mask says so, a bias, softmax, times v, transpose(1, 2).
After:  one biased_attention_filled that never writes the scores.
Applies to [batch, heads, length, head_dim] with as many key heads as query heads and a mask that all heads share.
"""

from __future__ import annotations

import math

import torch

from tilegym_fx.spelling import guard, spelling

#: Bias and mask are shared each for itself, so their alternatives are written in another order.
SHAPES = {"bias": ("1 or B", "1 or Hq", "1 or S", "T"), "mask": ("B or 1", "One", "S or 1", "T")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_neo/modeling_gpt_neo.py#L107-L132"
)
def kept_in_float32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float = 1.0,
    *,
    fill: float,
    hides: int = 0,
) -> torch.Tensor:
    """Scores are float32 and not divided; the mask tells which of them stay."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    weights = torch.softmax(torch.where(mask, scores, fill) + bias, dim=-1).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/cpmant/modeling_cpmant.py#L130-L157"
)
def taken_away(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float = -math.inf,
    hides: int = 1,
) -> torch.Tensor:
    """The bias is added first; the weights of keys that are taken away are set to 0 once more."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / divisor + bias
    weights = torch.softmax(scores.masked_fill(mask, fill), dim=-1).masked_fill(mask, 0.0)
    return torch.matmul(weights, v).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/openai/modeling_openai.py#L65-L80"
)
def mask_is_a_factor(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float = 8.0,
    fill: float = 0.0,
    hides: int = 0,
) -> torch.Tensor:
    """A table of ones and zeros times the scores, and a bias that takes away what became 0; heads of 64."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / divisor
    return torch.matmul(torch.softmax(scores * mask + bias, dim=-1), v).transpose(1, 2)


@guard
def mask_is_boolean_or_a_factor(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float,
    hides: int,
) -> str | None:
    if mask.dtype in (torch.bool, q.dtype):
        return None
    return f"the mask is {mask.dtype}, neither boolean nor {q.dtype}"
