"""Before: softplus of the step; exp(-exp(A_log) * step) * states + step * B * x, expanded to the states' shape.
After:  one mamba2_step, whose result the author copies into the cache.
Applies to one position.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def there_is_one_position(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, dt_bias: torch.Tensor
) -> str | None:
    if tuple(dt.shape) != (state.shape[0], 1, state.shape[1]):
        return f"dt is {list(dt.shape)}, not one step for each of the {state.shape[1]} heads"
    return None
