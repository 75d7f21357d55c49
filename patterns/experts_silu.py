"""Before: sort the pairs of token and expert, gather rows, two grouped products around silu(gate) * up,
times the
        weights, back to the tokens' order, sum over the experts of each token.
After:  one experts_silu.
Applies to [tokens, hidden] with weights of [experts, out, in].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import guard, spelling

#: Sizes need no common divisor, which only grouped products of 16 bits want.
SHAPES = {
    "hidden_states": ("tokens", "hidden"),
    "top_k_index": ("tokens", "K"),
    "top_k_weights": ("tokens", "K"),
    "gate_up_proj": ("E", "2 * inner", "hidden"),
    "down_proj": ("E", "hidden", "inner"),
}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/moe.py#L424-L537"
)
def counted_as_floats(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> torch.Tensor:
    """On a CPU the histogram counts floats."""
    count, per_token = gate_up_proj.shape[0], top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1))
    tokens = torch.histc(expert.float(), bins=count, min=0, max=count - 1)
    ends = torch.cumsum(tokens, dim=0, dtype=torch.int32)
    rows = hidden_states[order // per_token]
    gate, up = torch._grouped_mm(rows, gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    out = torch._grouped_mm(F.silu(gate) * up, down_proj.transpose(-2, -1), offs=ends)
    weighted = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    by_token = weighted[torch.argsort(order)].view(*top_k_index.shape, -1)
    return by_token.sum(dim=1).to(hidden_states.dtype)


@guard
def one_dtype(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> str | None:
    if gate_up_proj.dtype != hidden_states.dtype or down_proj.dtype != hidden_states.dtype:
        return f"the experts are {gate_up_proj.dtype} and the tokens {hidden_states.dtype}"
    return None
