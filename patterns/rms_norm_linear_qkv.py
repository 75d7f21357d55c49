"""Before: an RMS norm, then three linears that alone read it.
After:  one rms_norm_linear_qkv with three results.
Applies where no linear has a bias and the widths are those of queries, keys and values.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .linear_qkv import unfit
from .rms_norm_linear import unlike


@guard
def heads_fit(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
) -> str | None:
    return unfit(q_weight, k_weight) or unlike(hidden_states, q_weight)
