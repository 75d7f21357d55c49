"""experts_clamped: a mixture of experts with biases and a clamped gate of interleaved columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pass_checks import INVENTORY, check_pass, rand

check = partial(check_pass, only=("experts_clamped",))


def inputs_of(tokens: int = 6, experts: int = 4) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=random).bfloat16()
    first, second = rand(experts, 16, 48), rand(experts, 24, 16)
    return [rand(tokens, 16), chosen, shares, first, rand(experts, 48), second, rand(experts, 16)]


def experts(
    x: Any, index: Any, share: Any, gate_up: Any, gate_up_bias: Any, down: Any, down_bias: Any, low: float = -2.0
) -> Any:
    pairs, order = torch.sort(index.reshape(-1))
    counts = torch.histc(pairs.float(), bins=gate_up.shape[0], min=0, max=gate_up.shape[0] - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    both = torch._grouped_mm(x[order // index.shape[-1]], gate_up, offs=ends)
    both.add_(gate_up_bias[pairs])
    gate, up = both[..., ::2].clamp(min=None, max=2.0), both[..., 1::2].clamp(min=low, max=2.0)
    out = torch._grouped_mm((up + 1) * (gate * torch.sigmoid(gate * 1.7)), down, offs=ends)
    out.add_(down_bias[pairs])
    weighted = out * share.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[back].view(*index.shape, -1).sum(dim=1).to(x.dtype)


def test_hit() -> None:
    outcome = check(experts, inputs_of(), {"experts_clamped": 1})
    inputs = outcome.chosen[0].match.inputs
    assert (inputs["alpha"], inputs["limit"]) == (1.7, 2.0)


def test_near_miss_up_is_clamped_to_different_limits() -> None:
    check(partial(experts, low=-1.0), inputs_of(), {}, left=None, refused={"experts_clamped": "differs|clamp"})


def test_guard_on_experts_of_another_dtype() -> None:
    """torch multiplies no two dtypes, so no graph has them: the guard is asked itself."""
    (guard,) = INVENTORY.guards("experts_clamped")
    inputs = dict(zip(INVENTORY.definitions["experts_clamped"].inputs, [*inputs_of(), 1.7, 2.0], strict=True))
    assert guard(**inputs) is None
    assert "the experts are" in guard(**{**inputs, "down_proj": inputs["down_proj"].float()})
