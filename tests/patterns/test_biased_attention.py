"""biased_attention_masked and biased_attention_filled: a bias beside a mask that is added or fills."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand

NAME = "biased_attention_masked"
HEADS, SCALE = 4, 0.25
check = partial(check_pass, only=[NAME])


def batched(q: Any, k: Any, v: Any, bias: Any, mask: Any, beta: float = 1.0) -> Any:
    batch, heads, length, width = q.shape
    q, k, v = (x.reshape(batch * heads, -1, width) for x in (q, k, v))
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=beta, alpha=SCALE)
    weights = F.softmax(scores.view(batch, heads, length, -1) + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights.view(batch * heads, length, -1), v)
    return out.view(batch, heads, length, width).permute(0, 2, 1, 3)


def for_all_sequences(q: Any, k: Any, v: Any, bias: Any, hidden: Any, fill: float | None = None) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) * SCALE + bias
    scores = scores.masked_fill(hidden, torch.finfo(v.dtype).min if fill is None else fill)
    return torch.matmul(F.softmax(scores.float(), dim=-1).to(v.dtype), v).permute(0, 2, 1, 3)


def inputs(dtype: torch.dtype, *, batch: int = BATCH, biases: int = HEADS) -> list[torch.Tensor]:
    heads = [rand(batch, HEADS, LENGTH, 16, dtype=dtype, seed=i) for i in range(3)]
    return [*heads, rand(biases, 1, LENGTH, dtype=dtype)]


def hidden() -> torch.Tensor:
    return torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)


def added(dtype: torch.dtype) -> torch.Tensor:
    return torch.where(hidden(), torch.finfo(dtype).min, 0.0).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_hit_for_products_added_to_the_bias(dtype: torch.dtype) -> None:
    check(batched, [*inputs(dtype, biases=BATCH * HEADS), added(dtype)], {NAME: 1}, left=0)


@everywhere
def test_hit_for_a_bias_of_all_sequences(dtype: torch.dtype, dynamic: bool) -> None:
    check(for_all_sequences, [*inputs(dtype), hidden()], {NAME: 1}, dynamic=dynamic)


def test_hit_for_a_float32_bias() -> None:
    q, k, v, bias = inputs(BF16)
    check(for_all_sequences, [q, k, v, bias.float(), hidden()], {NAME: 1}, left=0)


@pytest.mark.parametrize(
    "code", [partial(batched, beta=0.5), partial(for_all_sequences, fill=-4.0)], ids=["half a bias", "another fill"]
)
def test_near_miss(code: Callable[..., Any]) -> None:
    is_batched = code.func is batched  # type: ignore[attr-defined]
    biases = BATCH * HEADS if is_batched else HEADS
    check(code, [*inputs(BF16, biases=biases), added(BF16) if is_batched else hidden()], {}, left=None)


def test_near_miss_the_bias_is_scaled_too() -> None:
    def code(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
        scores = (torch.matmul(q, k.transpose(-1, -2)) + bias) * SCALE
        scores = scores.masked_fill(hidden, torch.finfo(BF16).min)
        return torch.matmul(F.softmax(scores.float(), dim=-1).to(v.dtype), v).transpose(1, 2)

    check(code, [*inputs(BF16), hidden()], {}, left=None)


def test_guard_on_a_bias_for_each_query() -> None:
    q, k, v, _ = inputs(BF16)
    bias = rand(HEADS, LENGTH, LENGTH)
    check(for_all_sequences, [q, k, v, bias, hidden()], {}, left=None, refused={NAME: "bias is"})


def test_guard_on_a_mask_for_each_head() -> None:
    given = [*inputs(BF16), hidden().repeat(1, HEADS, 1, 1)]
    check(for_all_sequences, given, {}, left=None, refused={NAME: "mask is"})


FILLED = "biased_attention_filled"
check_filled = partial(check_pass, only=[FILLED])


def float32_scores(q: Any, k: Any, v: Any, bias: Any, kept: Any, fill: float = -3e4) -> Any:
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    scores = torch.where(kept, scores, torch.full((), fill, dtype=scores.dtype, device=scores.device)) + bias
    return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v).permute(0, 2, 1, 3)


def twice(q: Any, k: Any, v: Any, bias: Any, hidden: Any, last: float = 0.0) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(18) + bias
    scores = scores.masked_fill(hidden, torch.scalar_tensor(-math.inf, device=q.device, dtype=q.dtype))
    weights = F.softmax(scores, dim=-1)
    weights = torch.masked_fill(weights, hidden, torch.scalar_tensor(last, device=q.device, dtype=q.dtype))
    return torch.matmul(weights, v).permute(0, 2, 1, 3)


def with_bias(dtype: torch.dtype, heads: int, mask: torch.Tensor) -> list[torch.Tensor]:
    return [*inputs(dtype)[:3], rand(1, heads, LENGTH, LENGTH, dtype=dtype), mask]


@everywhere
def test_hit_for_scores_that_are_kept_in_float32(dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check_filled(float32_scores, with_bias(dtype, 1, ~hidden()), {FILLED: 1}, dynamic=dynamic)
    match = outcome.chosen[0].match
    assert (match.inputs["fill"], match.inputs["hides"], match.inputs["divisor"]) == (-3e4, 0, 1.0)


@everywhere
def test_hit_for_weights_that_are_taken_away_twice(dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check_filled(twice, with_bias(dtype, HEADS, hidden()), {FILLED: 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["fill"] == -math.inf


def with_a_factor(q: Any, k: Any, v: Any, kept: Any, divisor: float = 8.0) -> Any:
    scores = torch.matmul(q, k) / divisor
    weights = F.softmax(scores * kept + -1e4 * (1 - kept), dim=-1)
    return torch.matmul(weights, v).permute(0, 2, 1, 3)


def as_heads(x: torch.Tensor) -> list[torch.Tensor]:
    """Keys transposed twice by one permutation."""
    parts = x.view(*x.shape[:2], 3, HEADS, 16).unbind(2)
    return [parts[0].permute(0, 2, 1, 3), parts[1].permute(0, 2, 3, 1), parts[2].permute(0, 2, 1, 3)]


@everywhere
def test_hit_for_a_table_of_factors(dtype: torch.dtype, dynamic: bool) -> None:
    def code(x: Any, kept: Any) -> Any:
        return with_a_factor(*as_heads(x), kept)

    given = [rand(BATCH, LENGTH, 3 * HEADS * 16, dtype=dtype), (~hidden()).to(dtype)]
    outcome = check_filled(code, given, {FILLED: 1}, left=None, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["divisor"] == 8.0


def test_near_miss_divided_by_another_number() -> None:
    def code(x: Any, kept: Any) -> Any:
        return with_a_factor(*as_heads(x), kept, divisor=4.0)

    check_filled(code, [rand(BATCH, LENGTH, 3 * HEADS * 16), (~hidden()).to(BF16)], {}, left=None)


def test_near_miss_weights_are_filled_with_another_number() -> None:
    check_filled(partial(twice, last=0.5), with_bias(BF16, HEADS, hidden()), {}, left=None)


def test_near_miss_the_mask_says_what_goes_where_it_should_say_what_stays() -> None:
    def code(q: Any, k: Any, v: Any, bias: Any, hidden: Any) -> Any:
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
        scores = torch.where(hidden, torch.full((), -3e4), scores) + bias
        return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v).transpose(1, 2)

    check_filled(code, with_bias(BF16, 1, hidden()), {}, left=None)


def test_guard_on_a_bias_of_other_heads() -> None:
    q, k, v, bias, mask = with_bias(BF16, 1, hidden().repeat(1, HEADS, 1, 1))
    check_filled(twice, [q, k, v, bias, mask], {}, left=None, refused={FILLED: "mask is"})
