"""linear_bias: aten.linear with bias, addmm, and the Conv1D of GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand
from torch import nn
from transformers.pytorch_utils import Conv1D

NAME = "linear_bias"


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 64, dtype=dtype), rand(48, 64, dtype=dtype), rand(48, dtype=dtype)]
    check_pass(F.linear, inputs, {NAME: 1}, dynamic=dynamic)


@everywhere
def test_conv1d_of_transformers(dtype: torch.dtype, dynamic: bool) -> None:
    """addmm on flattened rows, with the weight stored the other way round: one view remains."""
    check_pass(Conv1D(48, 64).to(dtype), [rand(BATCH, LENGTH, 64, dtype=dtype)], {NAME: 1}, left=1, dynamic=dynamic)


def test_the_module_of_torch() -> None:
    check_pass(nn.Linear(64, 48).to(BF16), [rand(2, 5, 64)], {NAME: 1})


def test_addmm_of_two_parameters() -> None:
    check_pass(torch.addmm, [rand(48), rand(5, 64), rand(64, 48)], {NAME: 1}, left=1)


def matrix_bias(x: Any, w: Any, b: Any) -> Any:
    return torch.addmm(b, x, w)


def scaled(x: Any, w: Any, b: Any) -> Any:
    return torch.addmm(b[0], x, w, alpha=0.5)


@pytest.mark.parametrize("code", [matrix_bias, scaled])
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, [rand(5, 64), rand(64, 48), rand(5, 48)], {}, left=None)


def test_near_miss_a_bias_added_by_hand_rounds_twice() -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(48)]
    check_pass(lambda x, w, b: F.linear(x, w) + b, inputs, {"linear": 1}, left=1)


@pytest.mark.parametrize("shape", [(1,), (5, 48), (1, 48)], ids=str)
def test_guard_on_a_bias_that_is_no_row(shape: tuple[int, ...]) -> None:
    inputs = [rand(5, 64), rand(48, 64), rand(*shape)]
    try:
        F.linear(*inputs)
    except RuntimeError:
        pytest.skip("torch refuses it too")
    check_pass(F.linear, inputs, {}, left=1, refused={NAME: "bias (is|has)"})
