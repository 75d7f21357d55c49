"""Building blocks as models write them, for tests of the pass. All take tensors and give tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pass_checks import BF16, rand

EPS = 1e-5


def rms_norm(x: Any, weight: Any, eps: float = EPS) -> Any:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm_cast_last(x: Any, weight: Any, eps: float = EPS) -> Any:
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def rms_norm_plus_one(x: Any, weight: Any, eps: float = EPS) -> Any:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.float())).type_as(x)


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(x: Any, groups: int) -> Any:
    batch, heads, length, width = x.shape
    if groups == 1:
        return x
    return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, -1, length, width)


def attention(q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None) -> Any:
    groups = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(
        q, repeat_kv(k, groups), repeat_kv(v, groups), attn_mask=mask, is_causal=causal, scale=scale
    )
    return out.transpose(1, 2).contiguous()


def eager_attention(q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def attention_inputs(
    batch: int, length: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = BF16, keys: int = 0
) -> list[torch.Tensor]:
    """q, k and v; as many keys as queries unless told otherwise."""
    q = rand(batch, heads[0], length, 16, dtype=dtype)
    return [q, *(rand(batch, heads[1], keys or length, 16, dtype=dtype, seed=i) for i in (1, 2))]


def rotary_tables(batch: int, length: int, width: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """cos and sin of growing angles, the halves alike."""
    angles = torch.arange(length)[:, None] / 10 ** torch.linspace(0, 4, max(width // 2, 1))
    wide = torch.cat((angles, angles), -1).expand(batch, length, -1)
    return [wide.cos().to(dtype), wide.sin().to(dtype)]


def rotary_inputs(batch: int, length: int, dtype: torch.dtype = BF16, width: int = 16) -> list[torch.Tensor]:
    """q and k with heads in front, cos and sin."""
    q, k = (rand(batch, heads, length, width, dtype=dtype) for heads in (4, 2))
    return [q, k, *rotary_tables(batch, length, width, dtype)]
