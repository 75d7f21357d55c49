"""experts_silu and experts_silu_fp32: a mixture of gated MLPs by grouped products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BF16, FP32, check_pass, rand

NAMES = {BF16: "experts_silu", FP32: "experts_silu_fp32"}


def inputs_of(weights: torch.dtype, tokens: int = 6, experts: int = 4) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=random).to(weights)
    return [rand(tokens, 16), chosen, shares, rand(experts, 48, 16), rand(experts, 16, 24)]


def experts(x: Any, index: Any, share: Any, gate_up: Any, down: Any, *, gate_first: bool = True) -> Any:
    pairs, order = torch.sort(index.reshape(-1))
    counts = torch.histc(pairs.float(), bins=gate_up.shape[0], min=0, max=gate_up.shape[0] - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows = x[order // index.shape[-1]]
    one, two = torch._grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    active = F.silu(one) * two if gate_first else F.silu(two) * one
    out = torch._grouped_mm(active, down.transpose(-2, -1), offs=ends)
    weighted = out * share.reshape(-1)[order].unsqueeze(-1)
    return weighted[torch.argsort(order)].view(*index.shape, -1).sum(dim=1).to(x.dtype)


@pytest.mark.parametrize("weights", NAMES, ids=str)
def test_hit(weights: torch.dtype) -> None:
    check_pass(experts, inputs_of(weights), {NAMES[weights]: 1})


@pytest.mark.parametrize("weights", NAMES, ids=str)
def test_near_miss_the_gate_is_the_second_half(weights: torch.dtype) -> None:
    def code(*values: Any) -> Any:
        return experts(*values, gate_first=False)

    check_pass(code, inputs_of(weights), {}, left=None, only=[NAMES[weights]])


def test_near_miss_the_share_is_left_out() -> None:
    def code(x: Any, index: Any, share: Any, gate_up: Any, down: Any) -> Any:
        return experts(x, index, torch.ones_like(share), gate_up, down)

    outcome = check_pass(code, inputs_of(BF16), {"experts_silu": 1}, left=1)
    assert outcome.chosen[0].match.inputs["top_k_weights"].target is torch.ops.aten.ones_like.default


@pytest.mark.parametrize("weights", NAMES, ids=str)
def test_guard_on_experts_of_another_dtype(weights: torch.dtype) -> None:
    """torch multiplies no two dtypes, so no graph has them: the guard is asked itself."""
    from pass_checks import INVENTORY

    (guard,) = INVENTORY.guards(NAMES[weights])
    good = inputs_of(weights)
    assert guard(*good) is None
    assert "the experts are" in guard(*good[:3], good[3].float(), good[4])
