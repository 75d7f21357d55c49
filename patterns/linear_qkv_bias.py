"""Before: three linears of one input, with a bias each.
After:  one linear_qkv_bias with three results.
Applies where keys are as wide as values, and queries as wide as they or a multiple.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .linear_qkv import unfit


@guard
def heads_fit(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_weight: torch.Tensor,
    k_bias: torch.Tensor,
    v_weight: torch.Tensor,
    v_bias: torch.Tensor,
) -> str | None:
    return unfit(q_weight, k_weight)
