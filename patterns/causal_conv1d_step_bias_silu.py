"""Before: conv1d of a window with one group for each channel, its last position, silu.
After:  one causal_conv1d_step_bias_silu.
Applies to [batch, channels, window] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

#: The kernel's loop over the taps is unrolled.
MOST_TAPS = 8


@guard
def taps_are_few(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    if weight.shape[-1] > MOST_TAPS:
        return f"the convolution has {weight.shape[-1]} taps, and the kernel unrolls {MOST_TAPS} at most"
    return None
