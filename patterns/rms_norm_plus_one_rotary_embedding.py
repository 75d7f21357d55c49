"""Before: for q and for k: an RMS norm of every head scaled by one plus its weight, transpose, rotation.
After:  one rms_norm_plus_one_rotary_embedding with two results.
Applies to [batch, length, heads, head_dim] with cos and sin as wide as the head, all in one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

from .rms_norm_rotary_embedding import rotated, unfit

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}

Pair = tuple[torch.Tensor, torch.Tensor]


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gemma3/modeling_gemma3.py#L119-L133",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gemma3/modeling_gemma3.py#L325-L333",
    )
)
def transposed_before_the_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Pair:
    q, k = _normed(q.transpose(1, 2), q_weight, eps), _normed(k.transpose(1, 2), k_weight, eps)
    return rotated(q, cos, sin), rotated(k, cos, sin)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


@guard
def one_dtype(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> str | None:
    return unfit(q, k, q_weight, k_weight, cos, sin)
