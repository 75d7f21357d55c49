"""Before: add, then aten.layer_norm of the sum, which is also the next residual.
After:  one add_layer_norm with two results.
Applies where both addends have the same shape: token plus position embeddings broadcast, so they are refused.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of, unequal


@guard
def addends_have_one_shape(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> str | None:
    rows = not_a_row_of(hidden_states, weight=weight, bias=bias)
    return unequal(hidden_states=hidden_states, residual=residual) or rows
