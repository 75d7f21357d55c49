"""Before: for q and for k: to float32, view_as_complex, times the phases, view_as_real, cast back.
After:  one rotary_embedding_complex with two results.
Applies to [batch, heads, length, head_dim] with phases of [batch, 1, length, head_dim / 2], or to [batch, length,
heads, head_dim] with [batch, length, 1, head_dim / 2].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"q": None, "k": None, "phases": None}


@guard
def phases_fit_the_heads(q: torch.Tensor, k: torch.Tensor, phases: torch.Tensor) -> str | None:
    if q.dim() != 4 or k.dim() != 4 or phases.dim() != 4:
        return f"q, k and the phases have {q.dim()}, {k.dim()} and {phases.dim()} dimensions, not 4"
    batch, outer, inner, width = q.shape
    heads_first = tuple(phases.shape[1:3]) == (1, inner)
    fits = heads_first or tuple(phases.shape[1:3]) == (outer, 1)
    if phases.shape[0] not in (1, batch) or not fits or 2 * phases.shape[3] != width:
        return f"the phases are {list(phases.shape)}, not a row for each position of q {list(q.shape)}"
    shared = (batch, inner, width) if heads_first else (batch, outer, width)
    if (k.shape[0], k.shape[2 if heads_first else 1], k.shape[3]) != shared:
        return f"q is {list(q.shape)} but k is {list(k.shape)}"
    return None


@guard
def phases_are_complex64(q: torch.Tensor, k: torch.Tensor, phases: torch.Tensor) -> str | None:
    return None if phases.dtype == torch.complex64 else f"the phases are {phases.dtype}"
