"""linear: aten.linear without bias, and what comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from torch import nn

NAME = "linear"


def matmul_with_transposed_weight(x: Any, w: Any) -> Any:
    return torch.matmul(x, w.t())


def at_sign(x: Any, w: Any) -> Any:
    return x @ w.transpose(0, 1)


@everywhere
@pytest.mark.parametrize("code", [F.linear, matmul_with_transposed_weight, at_sign])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 64, dtype=dtype), rand(48, 64, dtype=dtype)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


@everywhere
def test_weight_stored_the_other_way_round(dtype: torch.dtype, dynamic: bool) -> None:
    """The transposed view remains and costs nothing."""
    inputs = [rand(BATCH, LENGTH, 64, dtype=dtype), rand(64, 48, dtype=dtype)]
    check_pass(torch.matmul, inputs, {NAME: 1}, left=1, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 3, 4, 64)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    check_pass(F.linear, [rand(*shape), rand(48, 64)], {NAME: 1})


def test_odd_sizes() -> None:
    check_pass(nn.Linear(2880, 50257 // 97, bias=False).to(BF16), [rand(1, 5, 2880)], {NAME: 1})


def test_one_value_through_two_weights() -> None:
    check_pass(lambda x, a, b: (F.linear(x, a), F.linear(x, b)), [rand(5, 64), rand(48, 64), rand(32, 64)], {NAME: 2})


def test_a_weight_of_two_modules_is_one_weight() -> None:
    check_pass(lambda x, w: F.linear(F.linear(x, w), w), [rand(5, 64), rand(64, 64)], {NAME: 2})


def test_near_miss_a_product_of_two_activations() -> None:
    check_pass(lambda q, k: q @ k.transpose(-1, -2), [rand(2, 5, 64), rand(2, 7, 64)], {}, left=None)


def test_near_miss_a_computed_weight() -> None:
    """Weights that are computed are still a linear, with the computed weight."""
    check_pass(lambda x, w: F.linear(x, w * 2), [rand(5, 64), rand(48, 64)], {NAME: 1}, left=1)


def test_guard_on_a_weight_that_is_no_matrix() -> None:
    check_pass(F.linear, [rand(5, 64), rand(64)], {}, left=1, refused={NAME: "1 dimensions, not 2"})


def test_float32_weights_are_compatible() -> None:
    outcome = check_pass(F.linear, [rand(5, 64, dtype=FP32), rand(48, 64, dtype=FP32)], {NAME: 1})
    assert outcome.chosen[0].match.kind == "compatible"


def test_a_dtype_that_no_solution_has_is_refused() -> None:
    inputs = [rand(5, 64, dtype=torch.float64), rand(48, 64, dtype=torch.float64)]
    outcome = check_pass(F.linear, inputs, {}, left=1)
    assert outcome.rejections[0].reason == "Solution linear is not verified for float64"
