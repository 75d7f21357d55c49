"""rms_norm_cast_last_add: the norm of a branch, added to the residual (post-norm)."""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "rms_norm_cast_last_add"
FP32_NAME = "rms_norm_add"


def post_norm(x: Any, residual: Any, w: Any) -> Any:
    return residual + blocks.rms_norm_cast_last(x, w)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    rows = [rand(BATCH, LENGTH, 64, dtype=dtype, seed=i) for i in range(2)]
    expected = {NAME if dtype == BF16 else FP32_NAME: 1}
    check_pass(post_norm, [*rows, rand(64, dtype=dtype)], expected, dynamic=dynamic)


def test_either_order_of_the_sum() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        return blocks.rms_norm_cast_last(x, w) + residual

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {NAME: 1})


def test_the_norm_in_one_operation() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        return residual + F.rms_norm(x, (64,), w, 1e-6)

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {NAME: 1})


def test_the_residual_is_the_branch_itself() -> None:
    def code(x: Any, w: Any) -> Any:
        return post_norm(x, x, w)

    check_pass(code, [rand(5, 64), rand(64)], {NAME: 1})


def test_near_miss_the_norm_is_also_returned() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        normal = blocks.rms_norm_cast_last(x, w)
        return residual + normal, normal

    inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64)]
    check_pass(code, inputs, {"rms_norm_cast_last": 1}, left=1, refused={NAME: "is also read by output"})


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 1)], ids=str)
def test_guard_on_a_residual_that_broadcasts(shape: tuple[int, ...]) -> None:
    inputs = [rand(5, 64), rand(*shape), rand(64)]
    refused = {NAME: "the kernel does not broadcast"}
    check_pass(post_norm, inputs, {"rms_norm_cast_last": 1}, left=1, refused=refused)


def test_near_miss_a_scaled_sum() -> None:
    def code(x: Any, residual: Any, w: Any) -> Any:
        return torch.add(residual, blocks.rms_norm_cast_last(x, w), alpha=0.5)

    inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64)]
    check_pass(code, inputs, {"rms_norm_cast_last": 1}, left=1)
