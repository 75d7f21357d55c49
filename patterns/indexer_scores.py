"""Before: queries and keys to float32, their products, times a factor, relu, product with the weights of the heads.
After:  one indexer_scores that never stores the products of the heads.
Applies to queries of [batch, length, heads, head_dim] and keys of [batch, keys, head_dim] in one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/hy_v4/modeling_hy_v4.py#L240-L250"
)
def without_factor(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The factor is in the weights."""
    products = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
    return torch.matmul(weights.unsqueeze(-2), torch.relu(products)).squeeze(-2)


@guard
def one_dtype(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float) -> str | None:
    return None if q.dtype == k.dtype else f"q is {q.dtype} but k is {k.dtype}"
