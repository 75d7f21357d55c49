"""Before: which ids are no padding, counted along the row, times that, plus the id of padding.
After:  one padded_positions.
Applies to ids of [rows, tokens].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/roberta/modeling_roberta.py#L138-L154"
)
def without_cache(ids: torch.Tensor, padding_idx: int, past: int = 0) -> torch.Tensor:
    """Nothing is in the cache: the prompt's call."""
    is_token = ids.ne(padding_idx).int()
    return (torch.cumsum(is_token, dim=-1).type_as(is_token) * is_token).long() + padding_idx
