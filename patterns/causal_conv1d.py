"""Before: conv1d padded by K - 1 with one group for each channel, cut to the prompt's length.
After:  one causal_conv1d.
Applies to [batch, channels, length] with any strides and at most 8 taps.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, misfit

#: The kernel's loop over the taps is unrolled.
MOST_TAPS = 8


def unfit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Why the kernel takes no such filters, for all of its Definitions."""
    channels, taps = x.shape[1], weight.shape[-1]
    wanted = {"weight": (weight, (channels, 1, taps))} | ({} if bias is None else {"bias": (bias, (channels,))})
    if (said := misfit(**wanted)) is not None or taps <= MOST_TAPS:
        return said
    return f"the convolution has {taps} taps, and the kernel unrolls {MOST_TAPS} at most"


@guard
def filters_fit(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    return unfit(x, weight)
