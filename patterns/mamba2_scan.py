"""Before: softplus of the steps; padding to chunks, sums between all positions of a chunk, five einsums; the states
        between chunks by sums between all chunks; the result cut to the prompt's length.
After:  one mamba2_scan with two results.
Applies to prompts of any length that begin with states of zero.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def states_fit(
    x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
    dt_bias: torch.Tensor, chunk_size: int, least: float, most: float,
) -> str | None:  # fmt: skip
    if not x.dtype == B.dtype == C.dtype:
        return f"x, B and C are {x.dtype}, {B.dtype} and {C.dtype}: the kernel splits all three alike"
    if B.shape[3] > 256:
        return f"each column has {B.shape[3]} states, and the kernel holds 256 at most"
    return None
