"""What tests of attention kernels have in common: operands, masks, launches, and float64 beside the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import EXACT, Rounding

from tilegym_fx.recording import recorded

DTYPES = FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

Tensors = tuple[torch.Tensor, ...]


def operands(batch: int, heads: int, key_heads: int, length: int, keys: int, width: int, dtype: Any) -> Tensors:
    """q, k and v as models make them: a transposed view of [B, S, H, D]."""
    torch.manual_seed(keys)
    sizes = ((length, heads), (keys, key_heads), (keys, key_heads))
    return tuple(torch.randn(batch, *size, width, dtype=dtype).transpose(1, 2) for size in sizes)


def check(kernels: Any, name: str, *values: Any, device: str = "cpu") -> torch.Tensor:
    """Runs the kernel, compares with float64 within the Definition's rounding, returns the result."""
    parameters = ("q", "k", "v", "mask", "scale") if len(values) == 5 else ("q", "k", "v", "scale")
    on_device = [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]
    got = getattr(kernels, name)(*on_device)
    wide = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
    rounding = Rounding.of(values[0].dtype)
    ((right, tolerance),) = EXACT[name](rounding, name, **dict(zip(parameters, wide, strict=True)))
    right = right.nan_to_num()  # a query that sees nothing
    assert got.shape == right.shape
    assert got.dtype == values[0].dtype
    assert got.is_contiguous()
    assert ((got.cpu().double() - right).abs() <= tolerance.nan_to_num()).all()
    return got


def masks(batch: int, heads: int, length: int, keys: int) -> dict[str, torch.Tensor]:
    """Boolean masks of every shape and content that models make."""
    torch.manual_seed(length)
    row, column = torch.arange(length)[:, None] + max(keys - length, 0), torch.arange(keys)
    causal = column <= row
    window = causal & (column > row - 8)
    padded = column[None, None, None] >= torch.arange(batch)[:, None, None, None] * (keys // 3)
    filled = (column < keys // 3).expand(batch, 1, 1, keys)
    return {
        "causal": causal[None, None],
        "causal, expanded": causal[None, None].expand(batch, 1, length, keys),
        "window and padding": (window | (column == row)) & padded,
        "padding": padded,
        "filled part of a cache": filled,
        "one for each head": torch.rand(1, heads, length, keys) < 0.3,
        "two-dimensional": torch.rand(length, keys) < 0.9,
        "nothing": torch.zeros(1, 1, length, keys, dtype=torch.bool),
    }


def launches_of(kernels: Any, dtype: Any, heads: int, key_heads: int, length: int, keys: int, width: int, mask: Any):
    q = torch.empty(1, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)
    k = torch.empty(1, keys, key_heads, width, dtype=dtype, device="meta").transpose(1, 2)
    with recorded() as launches:
        if mask is None:
            kernels.gqa_attention(q, k, k.clone(), 0.1)
        elif mask == "causal":
            kernels.gqa_attention_causal(q, k, k.clone(), 0.1)
        else:
            shape = (1, 1, mask[0], keys)
            kernels.gqa_attention_masked(q, k, k.clone(), torch.empty(shape, dtype=mask[1], device="meta"), 0.1)
    return launches
