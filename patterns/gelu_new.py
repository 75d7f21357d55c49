"""Before: 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
After:  one gelu_new.
Applies to any shape.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import spelling


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/bloom/modeling_bloom.py#L112-L121"
)
def factored(hidden_states: torch.Tensor) -> torch.Tensor:
    """x is a factor of what tanh takes, and sqrt(2 / pi) has eight digits."""
    bent = torch.tanh(0.79788456 * hidden_states * (1 + 0.044715 * hidden_states * hidden_states))
    return hidden_states * 0.5 * (1.0 + bent)
