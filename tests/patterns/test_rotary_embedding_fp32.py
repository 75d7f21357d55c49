"""rotary_embedding_fp32: cos and sin in float32, one cast back at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb

NAME = "rotary_embedding_fp32"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16, tables: torch.dtype = FP32) -> list[torch.Tensor]:
    heads = [rand(batch, heads, length, 16, dtype=dtype) for heads in (4, 2)]
    return [*heads, *(rand(batch, length, 16, dtype=tables, seed=i) for i in range(2))]


def cast_last(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    q_out, k_out = blocks.rotary(q, k, cos, sin)
    return q_out.to(q.dtype), k_out.type_as(k)


def cast_first(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    q_out, k_out = blocks.rotary(q.float(), k.float(), cos, sin)
    return q_out.to(q.dtype), k_out.to(k.dtype)


@everywhere
@pytest.mark.parametrize("code", [cast_last, cast_first, apply_rotary_pos_emb])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    """Without anything to cast it is the plain rotary_embedding."""
    expected = {NAME: 1} if dtype == BF16 else {"rotary_embedding": 1}
    check_pass(code, inputs_of(BATCH, LENGTH, dtype), expected, dynamic=dynamic)


def test_near_miss_tables_rounded_first() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype))

    check_pass(code, inputs_of(2, 5), {"rotary_embedding": 1}, left=2)


def test_near_miss_each_product_is_rounded() -> None:
    def turn(x: Any, cos: Any, sin: Any) -> Any:
        return (x * cos).to(x.dtype) + (blocks.rotate_half(x) * sin).to(x.dtype)

    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return turn(q, cos, sin), turn(k, cos, sin)

    check_pass(code, inputs_of(2, 5), {}, left=None)


def test_guard_on_tables_in_half_precision() -> None:
    """q and k are widened by hand, and so are the tables: their values are rounded ones."""

    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return cast_first(q, k, cos.float(), sin.float())

    inputs = inputs_of(2, 5, tables=BF16)
    outcome = check_pass(code, inputs, {NAME: 1}, left=2)
    assert outcome.chosen[0].match.inputs["cos"].target is torch.ops.aten.to.dtype


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_narrow_tables_beside_heads_made_wide(dynamic: bool) -> None:
    """Nothing but the tables themselves is rounded before the end."""
    check_pass(cast_first, inputs_of(BATCH, LENGTH, tables=BF16), {NAME: 1}, dynamic=dynamic)


def test_near_miss_narrow_tables_and_results_that_stay_wide() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(q.float(), k.float(), cos, sin)

    check_pass(code, inputs_of(2, 5, tables=BF16), {}, left=None)


def test_guard_on_tables_that_are_not_float32() -> None:
    inputs = inputs_of(2, 5, tables=BF16)
    expected: dict[str, int] = {"rotary_embedding": 1}
    check_pass(cast_last, inputs, expected)


@pytest.mark.parametrize("table", [(2, 5, 1), (2, 1, 16)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [*inputs_of(2, 5)[:2], *(rand(*table, dtype=FP32, seed=i) for i in range(2))]
    check_pass(cast_last, inputs, {}, left=None, refused={NAME: r"cos is .*, not \[1 or B, S, D\]"})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = inputs_of(2, 5)
    check_pass(cast_last, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "the kernel does not broadcast"})
