"""Before: an RMS norm, then a linear without bias that alone reads it.
After:  one rms_norm_linear.
Applies where rows and weight have one dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilegym_fx.spelling import guard, spelling


def norm_cast_last(hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm, rounded after the weight instead of before: closer to what the kernels compute."""
    wide = hidden_states.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (norm_weight * (wide * scale)).to(hidden_states.dtype)


def unlike(hidden_states: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why a norm and a weight do not fit together: normed rows keep the dtype of the rows."""
    if hidden_states.dtype != weight.dtype:
        return f"the rows are {hidden_states.dtype} and the weight is {weight.dtype}"
    return None


@spelling(
    source=(
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py#L48-L62",
        "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gpt_oss/modeling_gpt_oss.py#L635-L635",
    )
)
def norm_cast_last_then_linear(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> torch.Tensor:
    return F.linear(norm_cast_last(hidden_states, norm_weight, eps), weight)


@guard
def norm_fits_the_weight(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> str | None:
    return unlike(hidden_states, weight)
