"""Before: keys and values repeated for each query head, attention with is_causal=True, transpose(1, 2).
After:  one gqa_attention_causal that reads every key head once.
Applies to [batch, heads, length, head_dim] with one head dimension for queries, keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L85-L167"
)
def enable_gqa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The attention op shares keys and values itself."""
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L16-L25",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/falcon/modeling_falcon.py#L333-L360",
    )
)
def without_repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Nothing is repeated where each query head has a key head, or all share one, which broadcasts."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/whisper/modeling_whisper.py#L308-L312",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/opt/modeling_opt.py#L148-L154",
    )
)
def scaled_before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries are scaled, and rounded, before their products; nothing is repeated."""
    return F.scaled_dot_product_attention(q * scale, k, v, is_causal=True, scale=1.0).transpose(1, 2)
