"""Before: divided products, scores set to a number where a mask says so, a bias, softmax, times v, transpose(1, 2).
After:  one biased_attention_filled that never writes the scores.
Applies to [batch, heads, length, head_dim] with as many key heads as query heads and a mask that all heads share.
"""

from __future__ import annotations

import math

import torch

from tilegym_fx.spelling import guard, spelling


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
def heads_fit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float,
    hides: int,
) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        return f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        return f"q {list(q.shape)} and k {list(k.shape)} have other sequences, heads or widths"
    return None


@guard
def mask_is_shared_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float,
    hides: int,
) -> str | None:
    if mask.dim() != 4 or mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] != 1:
        return f"the mask is {list(mask.shape)}, not [batch, 1, queries, keys]"
    if mask.shape[2] not in (1, q.shape[2]) or mask.shape[3] != k.shape[2]:
        return f"the mask covers {list(mask.shape[2:])} places, not {q.shape[2]} queries by {k.shape[2]} keys"
    return None


@guard
def bias_fits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float,
    hides: int,
) -> str | None:
    wanted = (q.shape[0], q.shape[1], q.shape[2])
    sizes = tuple(bias.shape[:3])
    if (
        bias.dim() != 4
        or bias.shape[3] != k.shape[2]
        or any(s not in (1, w) for s, w in zip(sizes, wanted, strict=True))
    ):
        return (
            f"the bias is {list(bias.shape)}, not [1 or {wanted[0]}, 1 or {wanted[1]}, 1 or {wanted[2]}, {k.shape[2]}]"
        )
    return None


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
