"""Before: three linears of one input.
After:  one linear_qkv with three results.
Applies where no linear has a bias, keys are as wide as values, and queries as wide as they or a multiple.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


def unfit(q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor) -> str | None:
    """Why three weights are no query, key and value projection: so that gates and routers are not taken."""
    if any(weight.dim() != 2 for weight in (q_weight, k_weight, v_weight)):
        return "a weight is no matrix"
    queries, keys, values = q_weight.shape[0], k_weight.shape[0], v_weight.shape[0]
    if keys != values or queries % keys:
        return f"{queries}, {keys} and {values} features are no queries, keys and values"
    return None


@guard
def heads_fit(
    input: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor
) -> str | None:
    return unfit(q_weight, k_weight, v_weight)
