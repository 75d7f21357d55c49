"""Before: for q and for k: x * cos + cat(-x[half:], x[:half]) * sin, with cos and sin shared by all heads.
After:  one rotary_embedding with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head, in the dtype of q and k.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}


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
