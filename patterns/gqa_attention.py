"""Before: keys and values repeated for each query head, attention without a mask, transpose(1, 2).
After:  one gqa_attention that reads every key head once.
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
    attended = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/sdpa_attention.py#L16-L25",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/falcon/modeling_falcon.py#L333-L360",
    )
)
def without_repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Nothing is repeated where each query head has a key head, or all share one, which broadcasts."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/whisper/modeling_whisper.py#L308-L312",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/opt/modeling_opt.py#L148-L154",
    )
)
def scaled_before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries are scaled, and rounded, before their products; nothing is repeated."""
    return F.scaled_dot_product_attention(q * scale, k, v, scale=1.0).transpose(1, 2)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/llama/modeling_llama.py#L180-L202"
)
def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Matrix products around a float32 softmax."""
    return _eager(q, _share(k, q), _share(v, q), None, scale, torch.float32)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/llama/modeling_llama.py#L168-L202"
)
def eager_without_repeat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Matrix products around a float32 softmax, with nothing to repeat."""
    return _eager(q, k, v, None, scale, torch.float32)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt2/modeling_gpt2.py#L55-L73"
)
def eager_softmax_in_own_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Matrix products around a softmax in the dtype of q, with nothing to repeat."""
    return _eager(q, k, v, None, scale, None)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softmax_dtype: torch.dtype | None,
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2)


def _share(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    groups = q.shape[1] // heads
    shared = x[:, :, None].expand(batch, heads, groups, length, width)
    return shared.reshape(batch, heads * groups, length, width)
