"""Before: for q and for k: an RMS norm of every head, a transpose, the rotary embedding.
After:  one rms_norm_rotary_embedding with two results.
Applies to [batch, length, heads, head_dim] with cos and sin as wide as the head, all in one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of, spelling, unequal

Pair = tuple[torch.Tensor, torch.Tensor]


def unfit(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> str | None:
    """Why heads, weights and tables do not fit together."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return f"q, k and cos have {q.dim()}, {k.dim()} and {cos.dim()} dimensions, not 4, 4 and 3"
    batch, length, _, width = q.shape
    if tuple(k.shape[:2]) != (batch, length) or k.shape[3] != width:
        return f"q is {list(q.shape)} but k is {list(k.shape)}"
    if cos.shape[0] not in (1, batch) or tuple(cos.shape[1:]) != (length, width):
        return f"cos is {list(cos.shape)}, not one row for each position of q {list(q.shape)}"
    if len({x.dtype for x in (q, k, q_weight, k_weight, cos, sin)}) > 1:
        return "heads, weights and tables have different dtypes"
    return unequal(cos=cos, sin=sin) or not_a_row_of(q, q_weight=q_weight, k_weight=k_weight)


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
def heads_fit(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> str | None:
    return unfit(q, k, q_weight, k_weight, cos, sin)
