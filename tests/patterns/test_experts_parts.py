"""experts_rows and experts_combine: what stands around the grouped products of experts with any gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BF16, FP32, check_pass, rand

NAMES = ("experts_rows", "experts_combine", "grouped_linear")
check = partial(check_pass, only=NAMES)
INDEX = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(t))[:2] for t in range(6)])


def shares(dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).to(dtype)


def sorted_rows(x: Any, index: Any, *, count: int = 4, width: int | None = None) -> Any:
    expert, order = torch.sort(index.reshape(-1))
    tokens = torch.histc(expert.float(), bins=count, min=0, max=count - 1)
    return x[order // (width or index.shape[-1])], order, torch.cumsum(tokens, dim=0, dtype=torch.int32)


def combined(rows: Any, weights: Any, order: Any, *, dim: int = 1) -> Any:
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return weighted[inverse].view(*weights.shape, -1).sum(dim=dim).to(rows.dtype)


def experts(x: Any, index: Any, weights: Any, up: Any, down: Any) -> Any:
    """Without a gate: the square of a relu."""
    rows, order, ends = sorted_rows(x, index)
    opened = torch.relu(torch._grouped_mm(rows, up.transpose(-2, -1), offs=ends)).square()
    return combined(torch._grouped_mm(opened, down.transpose(-2, -1), offs=ends), weights, order)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_hit_experts_of_another_gate(dtype: torch.dtype) -> None:
    inputs = [rand(6, 16), INDEX, shares(dtype), rand(4, 24, 16), rand(4, 16, 24)]
    check(experts, inputs, {"experts_rows": 1, "experts_combine": 1, "grouped_linear": 2}, left=None)


@pytest.mark.parametrize("count", [4, 9])
def test_the_number_of_experts_is_captured(count: int) -> None:
    outcome = check(partial(sorted_rows, count=count), [rand(6, 16), INDEX], {"experts_rows": 1})
    assert outcome.chosen[0].match.inputs["count"] == count


def test_near_miss_rows_of_other_tokens() -> None:
    check(partial(sorted_rows, width=3), [rand(6, 16), INDEX], {}, left=None)


def test_near_miss_the_sorted_experts_are_read_besides() -> None:
    """As biases of experts do: the kernel does not give them."""

    def code(x: Any, index: Any, bias: Any) -> Any:
        expert, order = torch.sort(index.reshape(-1))
        ends = torch.cumsum(torch.histc(expert.float(), bins=4, min=0, max=3), dim=0, dtype=torch.int32)
        return x[order // 2], order, ends, bias[expert]

    check(code, [rand(6, 16), INDEX, rand(4, 16)], {}, left=None)


def test_near_miss_an_order_that_no_sort_gave() -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    check(combined, [rand(12, 16), shares(), order], {}, left=None)


def test_near_miss_summed_over_the_wrong_dimension() -> None:
    def code(x: Any, index: Any, weights: Any) -> Any:
        rows, order, ends = sorted_rows(x, index)
        return combined(rows, weights, order, dim=0), ends

    check(code, [rand(6, 16), INDEX, shares()], {"experts_rows": 1}, left=None)


def test_guard_tokens_in_batches() -> None:
    refused = {"experts_rows": "hidden_states has 3 dimensions, not 2"}
    check(sorted_rows, [rand(6, 3, 16), INDEX], {}, left=None, refused=refused)
