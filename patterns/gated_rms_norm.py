"""Before: x32 * silu(gate32), in groups of columns times rsqrt(mean of squares + eps), times the weight.
After:  one gated_rms_norm.
Applies to [batch, length, hidden] and groups of up to 16384 columns; the gate has the shape of what is normalised.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"hidden_states": ("...", "H"), "gate": ("...", "H")}

#: A block of the kernel holds a whole group.
WIDEST = 16384


def unfit(hidden_states: torch.Tensor, groups: int) -> str | None:
    """Why the kernel takes no such rows, for both of its Definitions."""
    if hidden_states.shape[-1] > WIDEST * groups:
        return f"a group has {hidden_states.shape[-1] // groups} columns, and the kernel holds {WIDEST} at most"
    return None


@guard
def groups_fit(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> str | None:
    return unfit(hidden_states, groups)
