"""rotary_embedding: q and k turned by halves, cos and sin shared by the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from blocks import rotary_inputs, rotary_tables
from pass_checks import BATCH, FP32, LENGTH, check_pass, everywhere, rand
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

NAME = "rotary_embedding"


def commuted(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos[:, None], sin[:, None]
    return [sin * blocks.rotate_half(x) + cos * x for x in (q, k)]


def chunked(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turn(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=3) * sin.unsqueeze(1)

    return turn(q), turn(k)


@everywhere
@pytest.mark.parametrize("code", [blocks.rotary, apply_rotary_pos_emb, commuted, chunked])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, rotary_inputs(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


@pytest.mark.parametrize("width", [2, 64, 80, 128, 256])
def test_head_dims(width: int) -> None:
    check_pass(blocks.rotary, rotary_inputs(1, 5, width=width), {NAME: 1})


def test_one_token() -> None:
    check_pass(blocks.rotary, rotary_inputs(2, 1), {NAME: 1})


def test_tables_broadcast_over_the_batch() -> None:
    q, k, *_ = rotary_inputs(2, 5)
    check_pass(blocks.rotary, [q, k, *rotary_tables(1, 5, 16)], {NAME: 1})


def test_several_layers_share_the_tables() -> None:
    """Each q goes with the k of its own layer."""

    def layers(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        for _ in range(4):
            q, k = blocks.rotary(torch.tanh(q), torch.tanh(k), cos, sin)
        return q, k

    outcome = check_pass(layers, rotary_inputs(2, 5), {NAME: 4}, left=8)
    for number, planned in enumerate(outcome.chosen):
        suffix = f"_{2 * number}" if number else ""
        assert str(planned.match.inputs["q"]) == f"tanh{suffix}"
        assert str(planned.match.inputs["k"]) == f"tanh_{2 * number + 1}"


def test_heads_moved_by_transpose_first() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q, k = (x.view(2, 5, -1, 16).transpose(1, 2) for x in (q, k))
        return blocks.rotary(q, k, cos, sin)

    check_pass(code, [rand(2, 5, 64), rand(2, 5, 32), *rotary_tables(2, 5, 16)], {NAME: 1}, left=4)


def opposite_sign(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Turns the other way: cat(x[half:], -x[:half])."""

    def turn(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((right, -left), dim=-1) * sin.unsqueeze(1)

    return turn(q), turn(k)


def halves_exchanged_without_sign(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turn(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((right, left), dim=-1) * sin.unsqueeze(1)

    return turn(q), turn(k)


def a_third_is_turned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turn(x: Any) -> Any:
        return x * cos.unsqueeze(1) + torch.cat((-x[..., 6:], x[..., :6]), dim=-1) * sin.unsqueeze(1)

    return turn(q), turn(k)


def cos_and_sin_exchanged_for_k(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return blocks.rotary(q, q, cos, sin)[0], blocks.rotary(k, k, sin, cos)[0]


def difference(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - blocks.rotate_half(q) * sin, k * cos - blocks.rotate_half(k) * sin


def only_q(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return blocks.rotary(q, q, cos, sin)[0]


@pytest.mark.parametrize(
    "code",
    [
        opposite_sign,
        halves_exchanged_without_sign,
        a_third_is_turned,
        cos_and_sin_exchanged_for_k,
        difference,
        only_q,
    ],
)
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, rotary_inputs(2, 5), {}, left=None)


def test_near_miss_says_where_the_halves_lie() -> None:
    check_pass(a_third_is_turned, rotary_inputs(2, 5), {}, left=None, refused={NAME: "is 6, not 8"})


def test_float32_tables_widen_q_and_k() -> None:
    q, k, *_ = rotary_inputs(2, 5)
    found = check_pass(blocks.rotary, [q, k, *rotary_tables(2, 5, 16, FP32)], {NAME: 1})
    assert [value.meta["val"].dtype for value in found.chosen[0].match.outputs] == [FP32, FP32]


def test_near_miss_float32_tables_for_q_alone() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        turned, _ = blocks.rotary(q, k, cos.float(), sin.float())
        return turned, blocks.rotary(q, k, cos, sin)[1]

    check_pass(code, rotary_inputs(2, 5), {}, left=None)


@pytest.mark.parametrize(
    ("q", "k", "table"),
    [
        ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 1)),
        ((2, 4, 5, 16), (2, 2, 5, 16), (2, 1, 16)),
        ((2, 4, 5, 16), (1, 2, 5, 16), (1, 5, 16)),
        ((2, 4, 5, 16), (2, 2, 1, 16), (2, 5, 16)),
    ],
    ids=str,
)
def test_guard_on_tables_that_do_not_fit(q: Any, k: Any, table: Any) -> None:
    inputs = [rand(*q), rand(*k), rand(*table), rand(*table, seed=1)]
    check_pass(blocks.rotary, inputs, {}, left=None, refused={NAME: "is \\["})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = rotary_inputs(2, 5)
    check_pass(blocks.rotary, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "the kernel does not broadcast"})


def test_guard_on_the_rank() -> None:
    inputs = [rand(2, 3, 4, 5, 16), rand(2, 3, 2, 5, 16), *(rand(2, 1, 5, 16, seed=i) for i in range(2))]

    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(q, k, cos, sin)

    check_pass(code, inputs, {}, left=None)


def test_an_inner_product_is_also_returned() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        product = q * cos.unsqueeze(1)
        return product, product + blocks.rotate_half(q) * sin.unsqueeze(1), blocks.rotary(k, k, cos, sin)[0]

    check_pass(code, rotary_inputs(2, 5), {}, left=None, refused={NAME: "also read by"})
