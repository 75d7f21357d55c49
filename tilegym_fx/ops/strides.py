"""Strides for references that are particular about them, as the code was that a Pattern was found in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

#: What torch's grouped products ask for: a packed row or column, and all other steps a multiple of these bytes.
_ALIGNED = 16


def for_grouped_products(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of which every matrix has strides that a grouped product takes, copied only where it has others."""
    return tuple(
        _aligned(a) if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() > 1 else a for a in args
    )


def _aligned(matrices: torch.Tensor) -> torch.Tensor:
    if _is_aligned(matrices) or _is_aligned(matrices.mT):
        return matrices
    width, step = matrices.shape[-1], _ALIGNED // matrices.itemsize
    return F.pad(matrices, (0, -width % step))[..., :width] if width % step else matrices.contiguous()


def _is_aligned(rows: torch.Tensor) -> bool:
    *outer, across, along = rows.stride()
    packed = along == 1 and across >= max(1, rows.shape[-1])
    return packed and all(step * rows.itemsize % _ALIGNED == 0 for step in (*outer, across))
