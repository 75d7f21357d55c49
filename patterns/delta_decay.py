"""Before: -exp(A_log32) * softplus(a32 + dt_bias).
After:  one delta_decay.
Applies to any leading shape.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, not_a_row_of


@guard
def vectors_are_rows(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> str | None:
    return not_a_row_of(a, A_log=A_log, dt_bias=dt_bias)
