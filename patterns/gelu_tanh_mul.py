"""Before: gelu(gate, approximate="tanh") * up on two separate values.
After:  one gelu_tanh_mul.
Applies where gate and up have the same shape.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, unequal


@guard
def branches_have_one_shape(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    return unequal(gate=gate, up=up)
