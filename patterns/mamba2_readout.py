"""Before: the states in the model's dtype times C expanded to all heads, as a bmm; plus x times D.
After:  one mamba2_readout.
Applies to one position.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"x": None, "C": None}


@guard
def there_is_one_position(state: torch.Tensor, x: torch.Tensor, C: torch.Tensor, D: torch.Tensor) -> str | None:
    batch, heads, width, states = state.shape
    if x.numel() != batch * heads * width or C.shape[0] != batch or C.shape[-1] != states:
        return f"x and C are {list(x.shape)} and {list(C.shape)}, and the states {list(state.shape)}"
    return None
