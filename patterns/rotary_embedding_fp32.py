"""Before: for q and for k: cast(x * cos + cat(-x[half:], x[:half]) * sin) with float32 x, or cos and sin.
After:  one rotary_embedding_fp32 with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling, unequal


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/olmo2/modeling_olmo2.py#L154-L177"
)
def promoted(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k become float32 where float32 cos and sin multiply them, after their halves have changed places."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos, sin).to(q.dtype), _rotate(k, cos, sin).to(k.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


@guard
def tables_fit_the_heads(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return f"q, k and cos have {q.dim()}, {k.dim()} and {cos.dim()} dimensions, not 4, 4 and 3"
    batch, _, length, width = q.shape
    if k.shape[0] != batch or tuple(k.shape[2:]) != (length, width):
        return f"q is {list(q.shape)} but k is {list(k.shape)}"
    if cos.shape[0] not in (1, batch) or tuple(cos.shape[1:]) != (length, width):
        return f"cos is {list(cos.shape)}, not one row for each position of q {list(q.shape)}"
    return unequal(cos=cos, sin=sin)


@guard(only="promoted")
def tables_are_float32(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return f"cos and sin are {cos.dtype} and {sin.dtype}: the products round to that"
    return None
