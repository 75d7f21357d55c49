"""gelu_mul: gelu(gate) * up, with the erf form of gelu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand
from torch import nn

NAME = "gelu_mul"


def up_last(gate: Any, up: Any) -> Any:
    return F.gelu(gate) * up


def up_first(gate: Any, up: Any) -> Any:
    return up * F.gelu(gate)


def module(gate: Any, up: Any) -> Any:
    return nn.GELU()(gate) * up


@everywhere
@pytest.mark.parametrize("code", [up_last, up_first, module])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 48, dtype=dtype), rand(BATCH, LENGTH, 48, dtype=dtype, seed=1)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


def test_near_miss_the_other_form_of_gelu() -> None:
    def code(gate: Any, up: Any) -> Any:
        return F.gelu(gate, approximate="tanh") * up

    inputs = [rand(5, 48), rand(5, 48, seed=1)]
    check_pass(code, inputs, {"gelu_tanh_mul": 1}, refused={NAME: "approximate .* is tanh, not none"})


def test_near_miss_gelu_written_out() -> None:
    def code(gate: Any, up: Any) -> Any:
        inner = 0.7978845608 * (gate + 0.044715 * gate.pow(3))
        return 0.5 * gate * (1 + torch.tanh(inner)) * up

    check_pass(code, [rand(5, 48), rand(5, 48, seed=1)], {}, left=None)


def test_near_miss_not_gated() -> None:
    check_pass(lambda gate: F.gelu(gate), [rand(5, 48)], {"gelu": 1})


@pytest.mark.parametrize("shape", [(5, 1), (48,)], ids=str)
def test_guard_on_branches_of_two_shapes(shape: tuple[int, ...]) -> None:
    inputs = [rand(5, 48), rand(*shape)]
    check_pass(up_last, inputs, {"gelu": 1}, left=1, refused={NAME: "the kernel does not broadcast"})
