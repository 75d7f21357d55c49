"""Before: keys and queries repeated for the heads of the values, cast, of length one; states times exp(decay); a sum
        over the key, an outer product, a sum over the query.
After:  one gated_delta_step with two results, the second of which the author copies into the cache.
Applies to one position.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

#: A block of the kernel holds a whole key.
WIDEST = 256


def _unit(rows: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.transpose(1, 2).to(torch.float32)
    return wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)


def _stepped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = q[:, :, 0], k[:, :, 0]
    v, decay, beta = (x.transpose(1, 2).to(torch.float32)[:, :, 0] for x in (v, decay, beta))
    faded = state * decay.exp()[..., None, None]
    change = (v - (faded * k.unsqueeze(-1)).sum(dim=-2)) * beta.unsqueeze(-1)
    state = faded + k.unsqueeze(-1) * change.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(dim=-2), state


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/qwen3_next/modeling_qwen3_next.py#L513-L577"
)
def divided_by_a_power_of_two(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The root of the width is a power of two: in the normal form a division by it is a product."""
    shared = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(shared, dim=2), k.repeat_interleave(shared, dim=2)
    return _stepped(_unit(q, eps) * q.shape[-1] ** -0.5, _unit(k, eps), v, decay, beta, state)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/olmo_hybrid/modeling_olmo_hybrid.py#L502-L566"
)
def a_key_for_each_value(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """There are as many keys as values."""
    return _stepped(_unit(q, eps) / q.shape[-1] ** 0.5, _unit(k, eps), v, decay, beta, state)


@spelling(
    source="https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/olmo_hybrid/modeling_olmo_hybrid.py#L502-L566"
)
def a_key_for_each_value_divided_by_a_power_of_two(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Both."""
    return _stepped(_unit(q, eps) * q.shape[-1] ** -0.5, _unit(k, eps), v, decay, beta, state)


@guard
def keys_are_no_wider(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    eps: float,
) -> str | None:  # fmt: skip
    if k.shape[-1] > WIDEST:
        return f"a key has {k.shape[-1]} columns, and the kernel holds {WIDEST} at most"
    return None
