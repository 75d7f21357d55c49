"""Before: for q and for k: x * cos + cat(-x[half:], x[:half]) * sin, with cos and sin shared by all heads.
After:  one rotary_embedding with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head, in the dtype of q and k.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling, unequal


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/phi3/modeling_phi3.py#L159-L186",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_neox/modeling_gpt_neox.py#L107-L140",
    )
)
def nothing_passes_through(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code for a rotated part and an untouched part, where the untouched part is empty."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate_and_keep_tail(q, cos, sin), _rotate_and_keep_tail(k, cos, sin)


def _rotate_and_keep_tail(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = rotated.shape[-1] // 2
    turned = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
    return torch.cat((rotated * cos + turned * sin, tail), dim=-1)


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
