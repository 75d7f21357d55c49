"""gqa_attention: no mask; keys and values shared by groups of query heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from blocks import attention_inputs
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAME = "gqa_attention"


def eager(q: Any, k: Any, v: Any) -> Any:
    return blocks.eager_attention(q, k, v, None, 0.25)


def shared_by_torch(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def interleaved(q: Any, k: Any, v: Any) -> Any:
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@everywhere
@pytest.mark.parametrize("code", [blocks.attention, eager, shared_by_torch])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (4, 4)], ids=["gqa", "mqa", "mha"])
def test_hit(code: Callable[..., Any], heads: tuple[int, int], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, attention_inputs(BATCH, LENGTH, heads, dtype), {NAME: 1}, dynamic=dynamic)


def test_more_keys_than_queries() -> None:
    check_pass(blocks.attention, attention_inputs(2, 1, keys=9), {NAME: 1})


def test_the_scale_is_captured_or_that_of_the_width() -> None:
    for given, scale in ((0.5, 0.5), (None, 0.25)):

        def code(q: Any, k: Any, v: Any, scale: float | None = given) -> Any:
            return blocks.attention(q, k, v, scale=scale)

        outcome = check_pass(code, attention_inputs(2, 5), {NAME: 1})
        assert outcome.chosen[0].match.inputs["scale"] == scale


@pytest.mark.parametrize("name", [NAME, f"{NAME}_causal", f"{NAME}_masked"])
@pytest.mark.parametrize("scale", [0.25, 0.3])
def test_queries_that_are_scaled_before_they_are_viewed(scale: float, name: str) -> None:
    def code(rows: Any, k: Any, v: Any, mask: Any) -> Any:
        q = (rows * scale).view(2, 5, 4, 16).transpose(1, 2)
        how = {"causal": {"is_causal": True}, "masked": {"attn_mask": mask}}.get(name.rpartition("_")[2], {})
        return F.scaled_dot_product_attention(q, k, v, scale=1.0, **how).transpose(1, 2)

    inputs = [rand(2, 5, 64), rand(2, 4, 5, 16, seed=1), rand(2, 4, 5, 16, seed=2), rand(2, 1, 5, 5)]
    outcome = check_pass(code, inputs, {name: 1}, left=2)  # the views
    assert outcome.chosen[0].match.inputs["scale"] == scale


def test_near_miss_queries_that_are_scaled_and_read_besides() -> None:
    """The factor stays in the graph, and the attention takes what it gives."""

    def code(rows: Any, k: Any, v: Any) -> Any:
        scaled = rows * 0.25
        q = scaled.view(2, 5, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2), scaled

    inputs = [rand(2, 5, 64), rand(2, 4, 5, 16, seed=1), rand(2, 4, 5, 16, seed=2)]
    outcome = check_pass(code, inputs, {NAME: 1}, left=None)
    assert outcome.chosen[0].match.inputs["scale"] == 1.0


def test_keys_also_returned_as_a_cache_would() -> None:
    check_pass(lambda q, k, v: (blocks.attention(q, k, v), k, v), attention_inputs(2, 5), {NAME: 1})


def dropout(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, enable_gqa=True).transpose(1, 3)


def heads_stay_in_front(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def keys_repeated_in_blocks(q: Any, k: Any, v: Any) -> Any:
    """Query head h reads key head h % 2, not h // 2."""
    k, v = (torch.cat((x, x), dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def values_are_keys(q: Any, k: Any, v: Any) -> Any:
    return blocks.eager_attention(q, k, v, None, 0.25) + 0 * v.sum()


@pytest.mark.parametrize("code", [dropout, heads_stay_in_front])
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, attention_inputs(2, 5), {}, left=None)


def test_near_miss_repeated_in_another_order_is_no_grouping() -> None:
    """Each query head then has a key head of its own: the copies stay."""
    outcome = check_pass(keys_repeated_in_blocks, attention_inputs(2, 5), {NAME: 1}, left=2)
    assert outcome.chosen[0].match.inputs["k"].target is torch.ops.aten.cat.default


def test_near_miss_dropout_at_work() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=1.0).transpose(1, 2)

    refused = {NAME: "dropout_p .* is 1.0, not 0.0"}
    check_pass(code, attention_inputs(2, 5, (4, 4)), {}, left=None, refused=refused)


def test_near_miss_two_scales() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q * 0.5, k.transpose(2, 3)) * 0.5
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)

    outcome = check_pass(code, attention_inputs(2, 5, (4, 4)), {NAME: 1}, left=1)
    assert outcome.chosen[0].match.inputs["scale"] == 0.5


def test_near_miss_softmax_over_the_queries() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        return torch.matmul(F.softmax(scores, dim=-2, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)

    check_pass(code, attention_inputs(2, 5, (4, 4)), {}, left=None, refused={NAME: "argument dim .* is -2, not -1"})


def test_near_miss_soft_cap() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 50) * 50
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)

    check_pass(code, attention_inputs(2, 5, (4, 4)), {}, left=None)


def test_near_miss_the_weights_are_also_returned() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2), weights

    check_pass(code, attention_inputs(2, 5, (4, 4)), {}, left=None, refused={NAME: "also read by output"})


def test_guard_on_values_of_another_width() -> None:
    q, k, v = attention_inputs(2, 5)
    wider = torch.cat((v, v), -1)
    check_pass(
        blocks.attention, [q, k, wider], {}, left=None, refused={NAME: r"v is .*, not \[B, Hk, T, D\]"}, only=[NAME]
    )


def test_guard_on_the_rank() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    check_pass(code, [rand(2, 5, 16) for _ in range(3)], {}, left=None)


def test_guard_on_a_batch_that_broadcasts() -> None:
    q, k, v = attention_inputs(2, 5, (4, 4))
    check_pass(blocks.attention, [q, k[:1], v[:1]], {}, left=None, refused={NAME: r"k is .*, not \[B, Hk, T, D\]"})


def test_guard_on_no_heads() -> None:
    """Nothing is divided by their number."""

    def code(q: Any, k: Any, v: Any) -> Any:
        weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2)

    none = [rand(2, 0, 5, 16) for _ in range(3)]
    check_pass(code, none, {}, left=None, refused={NAME: "Hq % Hk == 0 does not hold for Hk = 0, Hq = 0"})
