"""Before: scaled products with a bias for each head and a mask, softmax, times v, transpose(1, 2).
After:  one biased_attention_masked that never writes the scores.
Applies to [batch, heads, length, head_dim] with as many key heads as query heads, a bias that all queries share
and a mask that all heads share.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling


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
def heads_fit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        return f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        return f"q {list(q.shape)} and k {list(k.shape)} have other sequences, heads or widths"
    return None


@guard
def bias_is_for_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    heads = (q.shape[1], q.shape[0] * q.shape[1])
    if bias.dim() != 3 or bias.shape[0] not in heads or tuple(bias.shape[1:]) != (1, k.shape[2]):
        return f"the bias is {list(bias.shape)}, not [{heads[0]} or {heads[1]} heads, 1, {k.shape[2]} keys]"
    return None


@guard
def mask_is_shared_by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    if mask.dim() != 4 or mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] != 1:
        return f"the mask is {list(mask.shape)}, not [batch, 1, queries, keys]"
    if tuple(mask.shape[2:]) != (q.shape[2], k.shape[2]):
        return f"the mask covers {list(mask.shape[2:])} places, not {q.shape[2]} queries by {k.shape[2]} keys"
    if mask.dtype not in (torch.bool, q.dtype):
        return f"a mask of {mask.dtype} is added to scores of {q.dtype}"
    return None


@guard(only="product_added_to_bias")
def mask_is_added(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
