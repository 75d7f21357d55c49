"""Before: cast(x32 * rsqrt(mean(x32²) + eps)), a node for each operation, or PyTorch's own rms_norm.
After:  one rms_norm_unweighted.
Applies to any leading shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/diffllama/modeling_diffllama.py#L242-L242"
)
def one_operation(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """PyTorch computes it in float32 and rounds once, too."""
    return F.rms_norm(hidden_states, hidden_states.shape[-1:], None, eps)
