"""Before: softplus of the step; exp(-exp(A_log) * step) * states + step * B * x, expanded to the states' shape.
After:  one mamba2_step, whose result the author copies into the cache.
Applies to one position.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"x": None, "B": None}


@guard
def there_is_one_position(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, dt_bias: torch.Tensor
) -> str | None:
    batch, heads, width, states = state.shape
    if x.numel() != batch * heads * width or B.shape[0] != batch or B.shape[-1] != states:
        return f"x and B are {list(x.shape)} and {list(B.shape)}, and the states {list(state.shape)}"
    return None
