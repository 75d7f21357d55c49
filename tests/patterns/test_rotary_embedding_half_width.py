"""rotary_embedding_half_width: cos and sin have one value for each pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_half_width"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    q, k, cos, sin = blocks.rotary_inputs(batch, length, dtype)
    return [q, k, cos[..., :8].contiguous(), sin[..., :8].contiguous()]


def turn(x: Any, cos: Any, sin: Any) -> Any:
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def chunked(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turn(q, cos, sin), turn(k, cos, sin)


def sliced(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        left, right = x[..., :8], x[..., 8:]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([c * left - s * right, left * s + right * c], -1)

    return one(q), one(k)


@everywhere
@pytest.mark.parametrize("code", [chunked, sliced])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


def other_direction(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turn(q, cos, -sin), turn(k, cos, -sin)


def signs_exchanged(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((left * c + right * s, right * c - left * s), dim=-1)

    return one(q), one(k)


def test_near_miss_the_other_direction() -> None:
    check_pass(signs_exchanged, inputs_of(2, 5), {}, left=None)


def test_near_miss_a_negative_sine_is_another_table() -> None:
    outcome = check_pass(other_direction, inputs_of(2, 5), {NAME: 1}, left=1)
    assert outcome.chosen[0].match.inputs["sin"].target is torch.ops.aten.neg.default


def test_near_miss_tables_as_wide_as_the_head() -> None:
    """Only half of them could be meant, and torch refuses the product."""
    with pytest.raises(RuntimeError, match="must match"):
        chunked(*blocks.rotary_inputs(2, 5))


@pytest.mark.parametrize("table", [(2, 5, 1), (2, 1, 8)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [*inputs_of(2, 5)[:2], *(rand(*table, seed=i) for i in range(2))]
    check_pass(
        chunked, inputs, {}, left=None, refused={NAME: r"cos is .*, not \[1 or B, S, R\]|D == 2 \* R does not hold"}
    )


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = inputs_of(2, 5)
    check_pass(chunked, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "the kernel does not broadcast"})


def test_guard_on_q_and_k_of_two_lengths() -> None:
    q, k, cos, sin = inputs_of(2, 5)
    refused = {NAME: r"k is .*, not \[B, Hk, S, D\]"}
    check_pass(chunked, [q, k[:, :, :1], cos, sin], {}, left=None, refused=refused)
