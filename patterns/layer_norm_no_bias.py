"""Before: aten.layer_norm over the last dimension without a bias, or the same in float32 written out.
After:  one layer_norm_no_bias.
Applies to any leading shape; the weight must be one value for each column.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/cohere/modeling_cohere.py#L51-L65"
)
def written_out(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean and variance in float32, a node for each operation."""
    wide = hidden_states.float()
    distance = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(distance.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * (distance * scale)).to(hidden_states.dtype)
