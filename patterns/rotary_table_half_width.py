"""Before: positions times frequencies, cosine and sine, times a factor, cast to bfloat16.
After:  one rotary_table_half_width with two results.
Applies to integer positions of [batch, length, 1] and one row of frequencies.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"positions": ("...", "S", "One")}


@guard
def frequencies_are_a_row(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> str | None:
    if positions.dtype.is_floating_point or frequencies.dtype != torch.float32:
        return f"positions are {positions.dtype} and frequencies {frequencies.dtype}"
    return None
