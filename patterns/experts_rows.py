"""Before: the experts of all pairs sorted, counted and summed up, and the tokens' rows taken in that order.
After:  one experts_rows with three results.
Applies to [tokens, hidden] and [tokens, experts of a token].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling

SHAPES = {"hidden_states": ("tokens", "H"), "top_k_index": ("tokens", "K")}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/moe.py#L424-L537"
)
def counted_as_floats(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a CPU the histogram counts floats."""
    expert, order = torch.sort(top_k_index.reshape(-1))
    tokens = torch.histc(expert.float(), bins=count, min=0, max=count - 1)
    ends = torch.cumsum(tokens, dim=0, dtype=torch.int32)
    return hidden_states[order // top_k_index.shape[-1]], order, ends
