"""Before: conv1d of a window with one group for each channel, its last position, silu.
After:  one causal_conv1d_step_bias_silu.
Applies to [batch, channels, window] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

from .causal_conv1d import unfit

#: The window need not be one longer than the filters.
SHAPES = {"window": ("B", "C", "positions")}


@guard
def taps_are_few(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    return unfit(weight)
