"""Before: scores with one more column, the head's sink; softmax in the model's dtype; without that column,
times v. After:  one sink_attention_step that reads every key head once.
Applies to one query of one sequence, [1, heads, 1, head_dim], with a mask that is added and shared by all
heads.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

SHAPES = {"v": ("One", "Hk", "T", "V")}


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
    scores = torch.cat((scores, sinks.reshape(1, -1, 1, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1].to(v.dtype)
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
