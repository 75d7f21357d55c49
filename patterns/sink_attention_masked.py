"""Before: scores with one more column, the head's sink; softmax in the model's dtype; without that column,
times v. After:  one sink_attention_masked that reads every key head once.
Applies to [batch, heads, length, head_dim] with a mask that is added and shared by all heads.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

SHAPES = {"mask": ("1 or B", "One", "S", "T"), "v": ("B", "Hk", "T", "V")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/granite_swa/modeling_granite_swa.py#L91-L119"
)
def as_a_factor(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What the sink takes from the weights is a factor on the result, the sigmoid of how far it is
    outweighed.
    """
    groups = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, _share(k, groups).transpose(2, 3)) * scale + mask
    kept = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    attended = torch.matmul(weights, _share(v, groups))
    return (attended * kept.unsqueeze(-1).to(attended.dtype)).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/granite_swa/modeling_granite_swa.py#L91-L119"
)
def as_a_factor_unscaled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """The same where the configured scale is 1."""
    return as_a_factor(q, k, v, mask, sinks, scale)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/flint/modeling_flint.py#L207-L236"
)
def in_float32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Scores and softmax are float32."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.matmul(q.float(), _share(k, groups).float().transpose(2, 3)) * scale + mask
    sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1].to(v.dtype)
    return torch.matmul(weights, _share(v, groups)).transpose(1, 2)


def _share(x: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    shared = x[:, :, None].expand(batch, heads, groups, length, width)
    return shared.reshape(batch, heads * groups, length, width)


@guard
def mask_is_added(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> str | None:
    return None if mask.dtype == q.dtype else f"a mask of {mask.dtype} is added to scores of {q.dtype}"
