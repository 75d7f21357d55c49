"""Before: scaled products with a bias for each head and a mask, softmax, times v, transpose(1, 2).
After:  one biased_attention_masked that never writes the scores.
Applies to [batch, heads, length, head_dim] with as many key heads as query heads, a bias that all queries share
and a mask that all heads share.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

SHAPES = {"bias": ("Hq or B * Hq", "One", "T"), "mask": ("1 or B", "One", "S", "T")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/bloom/modeling_bloom.py#L266-L296"
)
def product_added_to_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Batches of matrices whose scaled product is added to the bias; the mask is added too."""
    batch, heads, length, width = q.shape
    left, right, values = (x.reshape(batch * heads, x.shape[2], width) for x in (q, k, v))
    scores = torch.baddbmm(bias, left, right.transpose(-1, -2), beta=1.0, alpha=scale)
    scores = scores.view(batch, heads, length, -1) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    attended = torch.bmm(weights.view(batch * heads, length, -1), values)
    return attended.view(batch, heads, length, width).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/mpt/modeling_mpt.py#L110-L133"
)
def bias_of_one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """A bias that needs no view, as all sequences share it; a mask that takes keys away."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale + bias
    scores = scores.masked_fill(mask, torch.finfo(q.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2)


@guard
def mask_is_boolean_or_added(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    if mask.dtype not in (torch.bool, q.dtype):
        return f"a mask of {mask.dtype} is added to scores of {q.dtype}"
    return None


@guard(only="product_added_to_bias")
def mask_is_added(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
