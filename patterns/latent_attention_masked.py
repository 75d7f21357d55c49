"""Before: latents expanded by a linear layer to keys and values of every head, the rotated key expanded to every head,
        cat of both parts of queries and of keys, attention under a mask, transpose(1, 2).
After:  one latent_attention_masked, which for few queries expands nothing.
Applies to queries of [batch, heads, length, width] and latents of [batch, 1, length, width], all of one dtype.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard

SHAPES = {"mask": ("1 or B", "One", "S", "T")}


@guard
def one_dtype(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latents: torch.Tensor,
    k_pe: torch.Tensor,
    kv_weight: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> str | None:
    given = {"q_pe": q_pe, "latents": latents, "k_pe": k_pe, "kv_weight": kv_weight}
    other = next((name for name, tensor in given.items() if tensor.dtype != q_nope.dtype), None)
    return None if other is None else f"q_nope is {q_nope.dtype} but {other} is {given[other].dtype}"
