"""Before: for q and for k: an RMS norm of every head, a transpose, the rotary embedding.
After:  one rms_norm_rotary_embedding with two results.
Applies to [batch, length, heads, head_dim] with cos and sin as wide as the head, all in one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}

Pair = tuple[torch.Tensor, torch.Tensor]


def unfit(*tensors: torch.Tensor) -> str | None:
    """Why heads, weights and tables do not fit together."""
    return "heads, weights and tables have different dtypes" if len({x.dtype for x in tensors}) > 1 else None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The half-split rotary embedding of [batch, heads, length, head_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of each head, rounded before the weight."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/exaone4/modeling_exaone4.py#L50-L64",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/exaone4/modeling_exaone4.py#L224-L235",
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
    q, k = normed(q.transpose(1, 2), q_weight, eps), normed(k.transpose(1, 2), k_weight, eps)
    return rotated(q, cos, sin), rotated(k, cos, sin)


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
