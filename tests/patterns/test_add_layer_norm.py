"""add_layer_norm: the sum with the residual is kept, and normalised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAME = "add_layer_norm"


def pre_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    x = x + residual
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5), x


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    rows = [rand(BATCH, LENGTH, 64, dtype=dtype, seed=i) for i in range(2)]
    check_pass(pre_norm, [*rows, *(rand(64, dtype=dtype, seed=i) for i in range(2))], {NAME: 1}, dynamic=dynamic)


def test_a_sum_of_three_takes_the_outer_one() -> None:
    def code(x: Any, y: Any, z: Any, weight: Any, bias: Any) -> Any:
        return pre_norm(x + y, z, weight, bias)

    check_pass(code, [*(rand(5, 64, seed=i) for i in range(3)), rand(64), rand(64, seed=1)], {NAME: 1}, left=1)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 1)], ids=str)
def test_guard_on_a_sum_that_broadcasts(shape: tuple[int, ...]) -> None:
    """Position embeddings without a batch dimension are added like this."""
    inputs = [rand(*shape), rand(5, 64), rand(64), rand(64, seed=1)]
    check_pass(pre_norm, inputs, {"layer_norm": 1}, left=1, refused={NAME: "the kernel does not broadcast"})


def test_near_miss_a_scaled_sum() -> None:
    def code(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        x = torch.add(residual, x, alpha=2)
        return F.layer_norm(x, (64,), weight, bias), x

    check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64), rand(64, seed=1)], {"layer_norm": 1}, left=1)


def test_two_norms_of_one_sum() -> None:
    """Parallel blocks normalise one value twice: the sum can be fused into one of the two."""

    def code(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        normal, x = pre_norm(x, residual, weight, bias)
        return normal, F.layer_norm(x, (64,), bias, weight), x

    inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64), rand(64, seed=1)]
    check_pass(code, inputs, {NAME: 1, "layer_norm": 1})
