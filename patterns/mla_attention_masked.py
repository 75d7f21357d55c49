"""Before: attention under a mask whose values have another head dimension than its keys, transpose(1, 2).
After:  one mla_attention_masked.
Applies to q and k of [batch, heads, length, head_dim] and v of [batch, heads, length, value_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import guard, spelling

SHAPES = {"mask": ("1 or B", "One", "S", "T")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L85-L167"
)
def enable_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention op shares keys and values itself."""
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@guard
def values_have_their_own_width(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> str | None:
    if v.shape[-1] == k.shape[-1]:
        return f"keys and values both have a head dimension of {v.shape[-1]}: that is grouped-query attention"
    return None
