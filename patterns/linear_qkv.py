"""Before: three linears of one input.
After:  one linear_qkv with three results.
Applies where no linear has a bias, keys are as wide as values, and queries as wide as they or a multiple.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


def unfit(q_weight: torch.Tensor, k_weight: torch.Tensor) -> str | None:
    """Why weights are no projections of queries and keys: so that gates and routers are not taken."""
    queries, keys = q_weight.shape[0], k_weight.shape[0]
    return f"{queries} and {keys} features are no queries and keys" if not keys or queries % keys else None


@guard
def heads_fit(
    input: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor
) -> str | None:
    return unfit(q_weight, k_weight)
