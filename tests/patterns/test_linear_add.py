"""linear_add: the residual is added to a projection without bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAME = "linear_add"


def code(x: Any, w: Any, residual: Any) -> Any:
    return residual + F.linear(x, w)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [
        rand(BATCH, LENGTH, 64, dtype=dtype),
        rand(48, 64, dtype=dtype),
        rand(BATCH, LENGTH, 48, dtype=dtype),
    ]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


def test_either_order() -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(5, 48)]
    check_pass(lambda x, w, r: F.linear(x, w) + r, inputs, {NAME: 1})


def test_two_projections_summed() -> None:
    """Either may be the residual of the other."""
    inputs = [rand(5, 64), rand(48, 64), rand(48, 64, seed=1)]
    check_pass(lambda x, a, b: F.linear(x, a) + F.linear(x, b), inputs, {NAME: 1, "linear": 1})


def test_a_projection_added_to_itself() -> None:
    def double(x: Any, w: Any) -> Any:
        y = F.linear(x, w)
        return y + y

    inputs = [rand(5, 64), rand(48, 64)]
    check_pass(double, inputs, {"linear": 1}, left=1, refused={NAME: "a value inside it"})


def test_near_miss_the_projection_is_also_returned() -> None:
    def both(x: Any, w: Any, residual: Any) -> Any:
        y = F.linear(x, w)
        return y + residual, y

    inputs = [rand(5, 64), rand(48, 64), rand(5, 48)]
    check_pass(both, inputs, {"linear": 1}, left=1, refused={NAME: "is also read by output"})


def test_near_miss_a_scaled_sum() -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(5, 48)]
    check_pass(lambda x, w, r: torch.add(r, F.linear(x, w), alpha=2), inputs, {"linear": 1}, left=1)


def test_near_miss_a_projection_with_bias() -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(48), rand(5, 48)]
    check_pass(lambda x, w, b, r: r + F.linear(x, w, b), inputs, {"linear_bias": 1}, left=1)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 1), (2, 5, 48)], ids=str)
def test_guard_on_a_residual_that_broadcasts(shape: tuple[int, ...]) -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(*shape)]
    check_pass(code, inputs, {"linear": 1}, left=1, refused={NAME: "the kernel does not broadcast"})


def test_guard_on_a_weight_that_is_no_matrix() -> None:
    inputs = [rand(5, 64), rand(64), rand(5)]
    check_pass(code, inputs, {}, left=2, refused={NAME: "1 dimensions, not 2"})


def test_the_residual_feeds_the_projection() -> None:
    check_pass(lambda x, w: x + F.linear(x, w), [rand(5, 64), rand(64, 64)], {NAME: 1})


def test_a_sum_written_into_the_projection_is_a_sum() -> None:
    def in_place(x: Any, w: Any, residual: Any) -> Any:
        y = F.linear(x, w)
        y += residual
        return y

    check_pass(in_place, [rand(5, 64), rand(48, 64), rand(5, 48)], {NAME: 1})
