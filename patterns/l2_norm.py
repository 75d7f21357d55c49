"""Before: x32 * rsqrt(sum(x32²) + eps), or x32 / sqrt(sum(x32²) + eps), a node for each operation.
After:  one l2_norm, whose result is float32.
Applies to any leading shape.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/kimi_linear/modeling_kimi_linear.py#L402-L410"
)
def divided(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Divided by the root instead of multiplied with its inverse."""
    wide = hidden_states.float()
    return wide / torch.sqrt(wide.square().sum(-1, keepdim=True) + eps)
