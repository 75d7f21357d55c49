"""Before: the experts of all pairs sorted, counted and summed up, and the tokens' rows taken in that order.
After:  one experts_rows with three results.
Applies to [tokens, hidden] and [tokens, experts of a token].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling


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


@guard
def tokens_are_rows(hidden_states: torch.Tensor, top_k_index: torch.Tensor, count: int) -> str | None:
    if hidden_states.dim() != 2 or top_k_index.dim() != 2:
        return f"tokens and experts have {hidden_states.dim()} and {top_k_index.dim()} dimensions, not 2"
    if hidden_states.shape[0] != top_k_index.shape[0]:
        return f"there are {hidden_states.shape[0]} tokens, and experts for {top_k_index.shape[0]}"
    return None
