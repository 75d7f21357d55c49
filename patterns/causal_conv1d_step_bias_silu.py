"""Before: conv1d of a window with one group for each channel, its last position, silu.
After:  one causal_conv1d_step_bias_silu.
Applies to [batch, channels, window] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, misfit

#: The kernel's loop over the taps is unrolled.
MOST_TAPS = 8


@guard
def taps_are_few(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    if weight.shape[-1] > MOST_TAPS:
        return f"the convolution has {weight.shape[-1]} taps, and the kernel unrolls {MOST_TAPS} at most"
    return None


@guard
def there_is_a_filter_for_each_channel(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    return misfit(weight=(weight, (window.shape[1], 1, weight.shape[-1])), bias=(bias, (window.shape[1],)))
