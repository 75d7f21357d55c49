"""Before: conv1d padded by K - 1 with one group for each channel, cut to the prompt's length.
After:  one causal_conv1d.
Applies to [batch, channels, length] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

#: The kernel's loop over the taps is unrolled.
MOST_TAPS = 8


def unfit(weight: torch.Tensor) -> str | None:
    """Why the kernel takes no such filters, for all of its Definitions."""
    taps = weight.shape[-1]
    return f"the convolution has {taps} taps, and the kernel unrolls {MOST_TAPS} at most" if taps > MOST_TAPS else None


@guard
def taps_are_few(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    return unfit(weight)
