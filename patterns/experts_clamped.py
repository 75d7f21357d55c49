"""Before: sort the pairs of token and expert, gather rows, two grouped products with biases around a
        clamped gate of interleaved columns, times the weights, back to the
        tokens' order, sum over the experts of each token.
After:  one experts_clamped.
Applies to [tokens, hidden] with weights of [experts, in, out].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

#: Sizes need no common divisor, which only grouped products of 16 bits want.
SHAPES = {
    "hidden_states": ("tokens", "hidden"),
    "top_k_index": ("tokens", "K"),
    "top_k_weights": ("tokens", "K"),
    "gate_up_proj": ("E", "hidden", "2 * inner"),
    "gate_up_proj_bias": ("E", "2 * inner"),
    "down_proj": ("E", "inner", "hidden"),
    "down_proj_bias": ("E", "hidden"),
}


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/integrations/moe.py#L424-L537"
)
def counted_as_floats(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """On a CPU the histogram counts floats."""
    count, per_token = gate_up_proj.shape[0], top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1))
    tokens = torch.histc(expert.float(), bins=count, min=0, max=count - 1)
    ends = torch.cumsum(tokens, dim=0, dtype=torch.int32)
    both = torch._grouped_mm(hidden_states[order // per_token], gate_up_proj, offs=ends) + gate_up_proj_bias[expert]
    gate, up = both[..., ::2].clamp(min=None, max=limit), both[..., 1::2].clamp(min=-limit, max=limit)
    opened = (up + 1) * (gate * torch.sigmoid(gate * alpha))
    out = torch._grouped_mm(opened, down_proj, offs=ends) + down_proj_bias[expert]
    weighted = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    by_token = weighted[torch.argsort(order)].view(*top_k_index.shape, -1)
    return by_token.sum(dim=1).to(hidden_states.dtype)


@guard
def one_dtype(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_bias: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_bias: torch.Tensor,
    alpha: float,
    limit: float,
) -> str | None:
    if gate_up_proj.dtype != hidden_states.dtype or down_proj.dtype != hidden_states.dtype:
        return f"the experts are {gate_up_proj.dtype} and the tokens {hidden_states.dtype}"
    return None
