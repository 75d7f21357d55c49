"""Before: x * sigmoid(g).
After:  one sigmoid_mul.
Applies where the gate has the shape of x, or one number for each of its rows.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def gate_fits(hidden_states: torch.Tensor, gate: torch.Tensor) -> str | None:
    if hidden_states.dim() != gate.dim() or tuple(gate.shape[:-1]) != tuple(hidden_states.shape[:-1]):
        return f"the gate is {list(gate.shape)} and what it gates {list(hidden_states.shape)}"
    if not hidden_states.dim() or gate.shape[-1] not in (1, hidden_states.shape[-1]):
        return f"the gate has {gate.shape[-1:]} columns, not one and not as many as {list(hidden_states.shape)}"
    return None
