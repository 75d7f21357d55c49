"""add_rms_norm_cast_last: the sum with the residual is kept, and normalised."""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "add_rms_norm_cast_last"
FP32_NAME = "add_rms_norm"


def pre_norm(x: Any, residual: Any, w: Any) -> Any:
    x = residual + x
    return blocks.rms_norm_cast_last(x, w), x


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    rows = [rand(BATCH, LENGTH, 64, dtype=dtype, seed=i) for i in range(2)]
    expected = {NAME if dtype == BF16 else FP32_NAME: 1}
    check_pass(pre_norm, [*rows, rand(64, dtype=dtype)], expected, dynamic=dynamic)


def test_the_norm_in_one_operation() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        x = residual + x
        return F.rms_norm(x, (64,), w), x

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {NAME: 1})


def test_either_order_of_the_sum() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        x = x + residual
        return x, blocks.rms_norm_cast_last(x, w)

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {NAME: 1})


def test_the_sum_may_have_no_other_reader() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        return blocks.rms_norm_cast_last(residual + x, w)

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {NAME: 1})


def test_one_value_added_to_itself() -> None:
    def code(x: Any, w: Any) -> Any:
        return pre_norm(x, x, w)

    check_pass(code, [rand(5, 64), rand(64)], {NAME: 1})


def test_a_chain_of_residual_sums() -> None:
    def code(x: Any, *weights: Any) -> Any:
        residual = x
        for w in weights:
            x, residual = pre_norm(torch.tanh(x), residual, w)
        return x

    check_pass(code, [rand(5, 64), *(rand(64, seed=i) for i in range(3))], {NAME: 3}, left=3)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 1)], ids=str)
def test_guard_on_a_sum_that_broadcasts(shape: tuple[int, ...]) -> None:
    inputs = [rand(*shape), rand(5, 64), rand(64)]
    refused = {NAME: "the kernel does not broadcast"}
    check_pass(pre_norm, inputs, {"rms_norm_cast_last": 1}, left=1, refused=refused)


def test_near_miss_a_scaled_sum() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        x = torch.add(residual, x, alpha=0.5)
        return blocks.rms_norm_cast_last(x, w), x

    inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64)]
    check_pass(code, inputs, {"rms_norm_cast_last": 1}, left=1)


def test_near_miss_a_difference() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        x = residual - x
        return blocks.rms_norm_cast_last(x, w), x

    inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64)]
    check_pass(code, inputs, {"rms_norm_cast_last": 1}, left=1)


def test_near_miss_a_number_is_added() -> None:
    def code(x: Any, w: Any) -> Any:
        x = x + 1.5
        return blocks.rms_norm_cast_last(x, w), x

    check_pass(code, [rand(5, 64), rand(64)], {"rms_norm_cast_last": 1}, left=1)
