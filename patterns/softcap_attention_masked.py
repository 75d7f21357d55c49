"""Before: scores through softcap * tanh(x / softcap), mask added, float32 softmax, times v.
After:  one softcap_attention_masked that reads every key head once.
Applies to [batch, heads, length, head_dim] with a mask that is added and shared by all heads.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def heads_fit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions, not 4"
    if v.shape[:3] != k.shape[:3] or q.shape[-1] != k.shape[-1]:
        return f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        return f"q {list(q.shape)} has no whole group of heads for each key head of {list(k.shape)}"
    return None


@guard
def mask_is_shared_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> str | None:
    if mask.dim() != 4 or mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] != 1:
        return f"the mask is {list(mask.shape)}, not [batch, 1, queries, keys]"
    if tuple(mask.shape[2:]) != (q.shape[2], k.shape[2]):
        return f"the mask covers {list(mask.shape[2:])} places, not {q.shape[2]} queries by {k.shape[2]} keys"
    return None


@guard
def mask_is_added(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
