"""rotary_embedding_single: one tensor, its heads beside the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_single"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [rand(batch, length, 4, 16, dtype=dtype), *blocks.rotary_tables(batch, length, 16, dtype)]


def code(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos.unsqueeze(2) + blocks.rotate_half(x) * sin.unsqueeze(2)


def commuted(x: Any, cos: Any, sin: Any) -> Any:
    return sin[:, :, None] * blocks.rotate_half(x) + cos[:, :, None] * x


@everywhere
@pytest.mark.parametrize("code", [code, commuted])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


def test_q_and_k_apart() -> None:
    def both(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return code(q, cos, sin), code(k, cos, sin)

    q, cos, sin = inputs_of(2, 5)
    check_pass(both, [q, rand(2, 5, 2, 16), cos, sin], {NAME: 2})


def opposite_sign(x: Any, cos: Any, sin: Any) -> Any:
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat((right, -left), dim=-1) * sin.unsqueeze(2)


def not_the_half(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos.unsqueeze(2) + torch.cat((-x[..., 6:], x[..., :6]), dim=-1) * sin.unsqueeze(2)


@pytest.mark.parametrize("code", [opposite_sign, not_the_half])
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, inputs_of(2, 5), {}, left=None)


def test_near_miss_says_where_the_halves_lie() -> None:
    check_pass(not_the_half, inputs_of(2, 5), {}, left=None, refused={NAME: "is 6, not 8"})


def test_near_miss_heads_in_front() -> None:
    """The table then stands beside another dimension."""

    def in_front(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos.unsqueeze(1) + blocks.rotate_half(x) * sin.unsqueeze(1)

    check_pass(in_front, [rand(2, 4, 5, 16), *inputs_of(2, 5)[1:]], {}, left=None)


@pytest.mark.parametrize("table", [(2, 5, 1), (2, 1, 16)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [inputs_of(2, 5)[0], *(rand(*table, seed=i) for i in range(2))]
    check_pass(code, inputs, {}, left=None, refused={NAME: r"cos is .*, not \[1 or B, S, D\]"})


def test_guard_on_tables_of_two_shapes() -> None:
    x, cos, sin = inputs_of(2, 5)
    check_pass(code, [x, cos, sin[:1]], {}, left=None, refused={NAME: "does not broadcast"})
