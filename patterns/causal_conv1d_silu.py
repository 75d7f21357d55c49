"""Before: conv1d padded by K - 1 with one group for each channel, cut to the prompt's length, silu.
After:  one causal_conv1d_silu.
Applies to [batch, channels, length] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .causal_conv1d import unfit


@guard
def taps_are_few(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    return unfit(weight)
