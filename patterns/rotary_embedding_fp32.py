"""Before: for q and for k: cast(x * cos + cat(-x[half:], x[:half]) * sin) with float32 x, or cos and sin.
After:  one rotary_embedding_fp32 with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}


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


@guard(only="promoted")
def tables_are_float32(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str | None:
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return f"cos and sin are {cos.dtype} and {sin.dtype}: the products round to that"
    return None
