"""Before: an RMS norm, then three linears with a bias each that alone read it.
After:  one rms_norm_linear_qkv_bias with three results.
Applies where the widths are those of queries, keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import guard, spelling

from .linear_qkv import unfit
from .rms_norm_linear import norm_cast_last, unlike


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py#L48-L62",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py#L299-L301",
    )
)
def norm_cast_last_then_projections(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_weight: torch.Tensor,
    k_bias: torch.Tensor,
    v_weight: torch.Tensor,
    v_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = norm_cast_last(hidden_states, norm_weight, eps)
    return F.linear(x, q_weight, q_bias), F.linear(x, k_weight, k_bias), F.linear(x, v_weight, v_bias)


@guard
def heads_fit(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_weight: torch.Tensor,
    k_bias: torch.Tensor,
    v_weight: torch.Tensor,
    v_bias: torch.Tensor,
) -> str | None:
    return unfit(q_weight, k_weight) or unlike(hidden_states, q_weight)
