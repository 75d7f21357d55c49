"""Before: softplus of both slopes, then where(x > 0, parabola, integrated exponential), a node for each operation.
After:  one xielu.
Applies to any shape; slopes, beta and eps are one number each.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"alpha_p": None, "alpha_n": None, "beta": None, "eps": None}


@guard
def slopes_are_numbers(
    hidden_states: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> str | None:
    if any(x.numel() != 1 or x.dim() > 1 for x in (alpha_p, alpha_n, beta, eps)):
        return f"the slopes are {list(alpha_p.shape)} and {list(alpha_n.shape)}, not one number each"
    if any(x.dtype != hidden_states.dtype for x in (alpha_p, alpha_n)):
        return f"slopes of {alpha_p.dtype} give values of {hidden_states.dtype} another dtype"
    return None
