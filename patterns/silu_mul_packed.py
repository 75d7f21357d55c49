"""Before: two slices of one value, silu of the first, mul with the second.
After:  one silu_mul_packed.
Applies where the slices are the two halves of the last dimension.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def width_is_even(gate_up: torch.Tensor) -> str | None:
    width = gate_up.shape[-1]
    return f"the packed value has {width} columns, which are not two halves" if width % 2 else None
