"""gqa_attention_masked: one mask for all heads, bool or added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from blocks import attention_inputs
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand

NAME = "gqa_attention_masked"


def mask_of(batch: int, queries: int, keys: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(batch, 1, -1, -1).clone()
    return seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


def repeated(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return blocks.attention(q, k, v, mask)


def shared_by_torch(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def eager(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return blocks.eager_attention(q, k, v, mask, 0.25)


def batched(q: Any, k: Any, v: Any, bounded: Callable[[Any], Any]) -> Any:
    batch, heads, length, width = q.shape
    q, k, v = (x.reshape(batch * heads, -1, width) for x in (q * 0.25, k, v))
    scores = bounded(torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, -1))
    weights = F.softmax(scores.view(batch * heads, length, -1), dim=-1)
    return torch.bmm(weights, v).view(batch, heads, length, width).transpose(1, 2)


def lowest(like: Any) -> Any:
    return torch.full((), max(torch.finfo(like.dtype).min, torch.finfo(FP32).min), device=like.device)


def bounded(q: Any, k: Any, v: Any, mask: Any) -> Any:
    def bound(scores: Any) -> Any:
        return torch.max(scores + mask, lowest(scores))

    return batched(q, k, v, bound)


def product_added_to(make: Callable[..., Any]) -> Callable[..., Any]:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        batch, heads, length, width = q.shape
        addend = make(batch * heads, length, k.shape[2], dtype=q.dtype, device=q.device)
        q, k = q.view(batch * heads, length, width), k.view(batch * heads, -1, width)
        scores = torch.baddbmm(addend, q, k.transpose(1, 2), beta=1.0, alpha=0.25)
        weights = F.softmax(scores.view(batch, heads, length, -1) + mask, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2)

    return code


added_to_zeros = product_added_to(torch.zeros)


@everywhere
@pytest.mark.parametrize("code", [repeated, shared_by_torch])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (4, 4)], ids=["gqa", "mqa", "mha"])
def test_hit(code: Callable[..., Any], heads: tuple[int, int], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [*attention_inputs(BATCH, LENGTH, heads, dtype), mask_of(BATCH, LENGTH, LENGTH)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


@everywhere
@pytest.mark.parametrize("code", [repeated, eager])
def test_hit_with_an_added_mask(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [*attention_inputs(BATCH, LENGTH, (4, 2), dtype), mask_of(BATCH, LENGTH, LENGTH, dtype)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


@everywhere
@pytest.mark.parametrize("code", [bounded, added_to_zeros])
def test_hit_with_a_head_for_each_key_head(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [*attention_inputs(BATCH, LENGTH, (4, 4), dtype), mask_of(BATCH, LENGTH, LENGTH, dtype)]
    outcome = check_pass(code, inputs, {NAME: 1}, dynamic=dynamic, only=[NAME])
    assert outcome.chosen[0].match.inputs["scale"] == 0.25


@pytest.mark.parametrize("code", [bounded, added_to_zeros])
def test_layers_share_their_constants(code: Callable[..., Any]) -> None:
    def layers(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return code(q, k, v, mask), code(k, q, v, mask)

    inputs = [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)]
    check_pass(layers, inputs, {NAME: 2}, left=None, only=[NAME])


def test_constants_that_others_read_stay() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return bounded(q, k, v, mask), lowest(q) * 0.5

    check_pass(code, [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)], {NAME: 1}, left=None, only=[NAME])


def test_near_miss_bounded_at_another_number() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return batched(q, k, v, lambda scores: torch.max(scores + mask, torch.full((), -4.0, device=q.device)))

    check_pass(code, [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)], {}, left=None, only=[NAME])


def test_near_miss_added_to_ones() -> None:
    inputs = [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)]
    check_pass(product_added_to(torch.ones), inputs, {}, left=None, only=[NAME])


def test_near_miss_added_to_zeros_that_are_kept() -> None:
    """Zeros may be read elsewhere, the scores may not."""

    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        batch, heads, length, width = q.shape
        zeros = torch.zeros(batch * heads, length, k.shape[2], dtype=q.dtype, device=q.device)
        flat = (x.view(batch * heads, -1, width) for x in (q, k))
        scores = torch.baddbmm(zeros, next(flat), next(flat).transpose(1, 2), beta=1.0, alpha=0.25)
        weights = F.softmax(scores.view(batch, heads, length, -1) + mask, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2), scores

    inputs = [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)]
    check_pass(code, inputs, {}, left=None, refused={NAME: "also read by"}, only=[NAME])


def test_one_mask_for_the_whole_batch() -> None:
    check_pass(repeated, [*attention_inputs(2, 5), mask_of(1, 5, 5)], {NAME: 1})


@pytest.mark.parametrize("code", [repeated, shared_by_torch, eager])
def test_a_mask_for_each_query_head(code: Callable[..., Any]) -> None:
    check_pass(code, [*attention_inputs(2, 5, (4, 2)), rand(2, 4, 5, 5)], {NAME: 1})


def test_decode() -> None:
    check_pass(repeated, [*attention_inputs(2, 1, keys=9), mask_of(2, 1, 9)], {NAME: 1})


@pytest.mark.parametrize("code", [repeated, shared_by_torch, eager])
@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (2, 1, 1, 5), (5, 5), (1, 5, 5), (4, 1, 5)], ids=str)
def test_a_mask_that_broadcasts(code: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """Plain code has one for all sequences and heads, or a row for each sequence."""
    check_pass(code, [*attention_inputs(2, 5, (4, 2)), rand(*shape)], {NAME: 1})


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (5,), ()], ids=str)
def test_guard_on_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    """It would give the scores more sizes, or has fewer dimensions than the attention op takes."""
    inputs = [*attention_inputs(1, 5, (4, 4)), rand(*shape)]
    check_pass(eager, inputs, {}, left=None, refused={NAME: "mask is .*, which the kernel does not broadcast"})


def test_guard_on_values_of_another_width() -> None:
    q, k, v = attention_inputs(2, 5)
    inputs = [q, k, v[..., :8], mask_of(2, 5, 5)]
    check_pass(repeated, inputs, {}, left=None, refused={NAME: r"v is .*, not \[B, Hk, T, D\]"}, only=[NAME])


def test_guard_on_a_float32_mask_added_to_half_precision_scores() -> None:
    """The sum is then float32, and the rounding another."""
    inputs = [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, FP32)]
    check_pass(eager, inputs, {}, left=None, only=[NAME])


def test_near_miss_the_mask_multiplies() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 * mask
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)

    check_pass(code, [*attention_inputs(2, 5, (4, 4)), rand(2, 1, 5, 5)], {}, left=None)


def test_near_miss_the_mask_is_scaled_too() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = (torch.matmul(q, k.transpose(2, 3)) + mask) * 0.25
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2)

    check_pass(code, [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)], {}, left=None)


def test_near_miss_a_sink_beside_the_scores() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
        sink = torch.zeros_like(scores[..., :1])
        weights = F.softmax(torch.cat((scores, sink), -1), dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights[..., :-1], v).transpose(1, 2)

    check_pass(code, [*attention_inputs(2, 5, (4, 4)), mask_of(2, 5, 5, BF16)], {}, left=None)
