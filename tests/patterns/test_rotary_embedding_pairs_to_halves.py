"""rotary_embedding_pairs_to_halves: neighbouring columns are a pair; the result has them in two halves."""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_pairs_to_halves"


def turn(x: Any, cos: Any, sin: Any) -> Any:
    one, two = x[..., ::2], x[..., 1::2]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(1) for table in (cos, sin))
    return turn(q, cos, sin), turn(k, cos, sin)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, blocks.rotary_inputs(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


def test_near_miss_the_second_half_of_the_tables() -> None:
    def second(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        cos, sin = (table[..., 8:].unsqueeze(1) for table in (cos, sin))
        return turn(q, cos, sin), turn(k, cos, sin)

    check_pass(second, blocks.rotary_inputs(2, 5), {}, left=None, only=[NAME])


def test_near_miss_the_result_stays_in_pairs() -> None:
    def pairs(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        def one(x: Any) -> Any:
            a, b = x[..., ::2], x[..., 1::2]
            c, s = cos[..., :8].unsqueeze(1), sin[..., :8].unsqueeze(1)
            return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)

        return one(q), one(k)

    check_pass(pairs, blocks.rotary_inputs(2, 5), {}, left=None, only=[NAME])


@pytest.mark.parametrize("table", [(2, 5, 2), (2, 1, 16)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [*blocks.rotary_inputs(2, 5)[:2], *(rand(*table, seed=i) for i in range(2))]
    check_pass(code, inputs, {}, left=None, only=[NAME], refused={NAME: r"cos is .*, not \[1 or B, S, D\]"})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = blocks.rotary_inputs(2, 5)
    check_pass(code, [q, k, cos, sin[:1]], {}, left=None, only=[NAME], refused={NAME: "does not broadcast"})
