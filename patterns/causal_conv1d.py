"""Before: conv1d padded by K - 1 with one group for each channel, cut to the prompt's length.
After:  one causal_conv1d.
Applies to [batch, channels, length] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, misfit

#: The kernel's loop over the taps is unrolled.
MOST_TAPS = 8


@guard
def taps_are_few(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    if weight.shape[-1] > MOST_TAPS:
        return f"the convolution has {weight.shape[-1]} taps, and the kernel unrolls {MOST_TAPS} at most"
    return None


@guard
def there_is_a_filter_for_each_channel(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    return misfit(weight=(weight, (x.shape[1], 1, weight.shape[-1])))
