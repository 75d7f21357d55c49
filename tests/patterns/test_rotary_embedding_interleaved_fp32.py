"""rotary_embedding_interleaved_fp32: neighbouring columns are a pair; float32 inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_interleaved_fp32"


def turn_pairs(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turn(x: Any, cos: Any, sin: Any) -> Any:
    return (x.float() * cos.unsqueeze(1) + turn_pairs(x.float()) * sin.unsqueeze(1)).to(x.dtype)


def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turn(q, cos, sin), turn(k, cos, sin)


def reshaped(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        wide = x.to(torch.float32)
        pairs = torch.stack([-wide[..., 1::2], wide[..., 0::2]], -1)
        return (wide * cos[:, None] + pairs.reshape(wide.shape) * sin[:, None]).type_as(x)

    return one(q), one(k)


@everywhere
@pytest.mark.parametrize("code", [code, reshaped])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, blocks.rotary_inputs(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


def test_near_miss_halves_in_float32() -> None:
    def halves(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q_out, k_out = blocks.rotary(q.float(), k.float(), cos.float(), sin.float())
        return q_out.to(q.dtype), k_out.to(k.dtype)

    check_pass(halves, blocks.rotary_inputs(2, 5), {"rotary_embedding_fp32": 1}, left=2)


def other_sign(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        wide = x.float()
        pairs = torch.stack((wide[..., 1::2], -wide[..., ::2]), dim=-1).flatten(-2)
        return (wide * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)).to(x.dtype)

    return one(q), one(k)


def in_half_precision(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return [x * cos + turn_pairs(x) * sin for x in (q, k)]


@pytest.mark.parametrize("code", [other_sign, in_half_precision])
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, blocks.rotary_inputs(2, 5), {}, left=None, only=[NAME])


@pytest.mark.parametrize("table", [(2, 5, 1), (2, 1, 16)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [*blocks.rotary_inputs(2, 5)[:2], *(rand(*table, seed=i) for i in range(2))]
    check_pass(code, inputs, {}, left=None, refused={NAME: r"cos is .*, not \[1 or B, S, D\]"})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = blocks.rotary_inputs(2, 5)
    check_pass(code, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "does not broadcast"})


def test_the_definitions_own_dtype_is_half_precision() -> None:
    outcome = check_pass(code, blocks.rotary_inputs(2, 5, BF16), {NAME: 1})
    assert outcome.chosen[0].match.kind == "exact"
