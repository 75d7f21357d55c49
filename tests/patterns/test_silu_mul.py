"""silu_mul: silu(gate) * up of two separate values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand
from torch import nn

NAME = "silu_mul"


def up_last(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


def up_first(gate: Any, up: Any) -> Any:
    return up * F.silu(gate)


def module(gate: Any, up: Any) -> Any:
    return nn.SiLU()(gate) * up


@everywhere
@pytest.mark.parametrize("code", [up_first, module])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 48, dtype=dtype), rand(BATCH, LENGTH, 48, dtype=dtype, seed=1)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (1, 1), (2, 3, 4, 5)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    check_pass(up_first, [rand(*shape), rand(*shape, seed=1)], {NAME: 1})


def test_the_activated_branch_is_the_gate() -> None:
    """Gate and up are told apart by what is computed, not by their order."""
    for code, activated in ((up_last, "arg0_1"), (lambda a, b: F.silu(b) * a, "arg1_1")):
        outcome = check_pass(code, [rand(5, 48), rand(5, 48, seed=1)], {NAME: 1})
        gate = outcome.chosen[0].match.inputs["gate"]
        assert str(gate) == activated


def test_gate_and_up_are_one_value() -> None:
    check_pass(lambda x: F.silu(x) * x, [rand(5, 48)], {NAME: 1})


def test_a_gated_mlp() -> None:
    def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    weights = [rand(48, 64), rand(48, 64, seed=1), rand(64, 48)]
    check_pass(mlp, [rand(5, 64), *weights], {NAME: 1, "linear": 3})


def written_out(gate: Any, up: Any) -> Any:
    return gate * torch.sigmoid(gate) * up


def quick_gelu(gate: Any, up: Any) -> Any:
    return gate * torch.sigmoid(1.702 * gate) * up


def plus_one(gate: Any, up: Any) -> Any:
    return F.silu(gate) * (up + 1)


@pytest.mark.parametrize("code", [quick_gelu, lambda g, u: F.sigmoid(g) * u, lambda g, u: F.silu(g) + u])
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, [rand(5, 48), rand(5, 48, seed=1)], {}, left=None)


def test_near_miss_the_product_rounds_in_between() -> None:
    """x * sigmoid(x) rounds once more than silu in bf16."""
    check_pass(written_out, [rand(5, 48), rand(5, 48, seed=1)], {}, left=3)


def test_near_miss_what_is_added_to_up_stays_outside() -> None:
    check_pass(plus_one, [rand(5, 48), rand(5, 48, seed=1)], {NAME: 1}, left=1)


def test_near_miss_the_activated_gate_is_also_returned() -> None:
    def code(gate: Any, up: Any) -> Any:
        active = F.silu(gate)
        return active * up, active

    check_pass(code, [rand(5, 48), rand(5, 48, seed=1)], {}, left=2, refused={NAME: "also read by output"})


@pytest.mark.parametrize("shape", [(5, 1), (48,), (1, 48)], ids=str)
def test_guard_on_branches_of_two_shapes(shape: tuple[int, ...]) -> None:
    inputs = [rand(5, 48), rand(*shape)]
    check_pass(up_first, inputs, {}, left=2, refused={NAME: "the kernel does not broadcast"})


def test_near_miss_a_number_for_up() -> None:
    check_pass(lambda gate: F.silu(gate) * 2.0, [rand(5, 48)], {}, left=2)


def test_mixed_dtypes_widen_before_the_product() -> None:
    check_pass(up_first, [rand(5, 48), rand(5, 48, dtype=torch.float32)], {}, left=None)


def test_bf16_is_the_definitions_own_dtype() -> None:
    assert check_pass(up_first, [rand(5, 48), rand(5, 48, seed=1)], {NAME: 1}).chosen[0].match.kind == "exact"
    inputs = [rand(5, 48, dtype=torch.float16), rand(5, 48, dtype=torch.float16, seed=1)]
    assert check_pass(up_first, inputs, {NAME: 1}).chosen[0].match.kind == "compatible"
