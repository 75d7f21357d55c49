"""gelu, gelu_tanh, gelu_new, relu and relu_squared: activations without a gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand
from torch import nn
from transformers.activations import NewGELUActivation, ReLUSquaredActivation

NAMES = ("gelu", "gelu_tanh", "gelu_new", "relu", "relu_squared")


def gelu_new(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_new_factored(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


HITS: list[tuple[str, Callable[..., Any]]] = [
    ("gelu", F.gelu),
    ("gelu", nn.GELU()),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("gelu_tanh", nn.GELU(approximate="tanh")),
    ("gelu_new", gelu_new),
    ("gelu_new", NewGELUActivation()),
    ("gelu_new", gelu_new_factored),
    ("relu", F.relu),
    ("relu", nn.ReLU()),
    ("relu_squared", lambda x: F.relu(x).square()),
    ("relu_squared", ReLUSquaredActivation()),
]


@everywhere
@pytest.mark.parametrize(("name", "code"), HITS)
def test_hit(name: str, code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, [rand(BATCH, LENGTH, 48, dtype=dtype)], {name: 1}, dynamic=dynamic)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 3, 4, 5)], ids=str)
def test_any_shape(name: str, shape: tuple[int, ...]) -> None:
    check_pass(dict(HITS)[name], [rand(*shape)], {name: 1})


def quick_gelu(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def other_constant(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0))))


def other_power(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0))))


def factored_with_another_constant(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.tanh(0.7978 * x * (1 + 0.044715 * x * x)))


@pytest.mark.parametrize(
    "code",
    [quick_gelu, other_constant, other_power, factored_with_another_constant, F.relu6, torch.square, F.elu],
)
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, [rand(5, 48)], {}, left=None)


def test_near_miss_says_which_constant_differs() -> None:
    refused = {"gelu_new": r"is 0\.0447, not 0\.044715"}
    check_pass(other_constant, [rand(5, 48)], {}, left=None, refused=refused)


def test_near_miss_the_rectified_value_is_also_returned() -> None:
    def code(x: Any) -> Any:
        positive = torch.relu(x)
        return positive, positive.square()

    check_pass(code, [rand(5, 48)], {"relu": 1}, left=1, refused={"relu_squared": "also read by output"})


def test_near_miss_squared_first() -> None:
    check_pass(lambda x: torch.relu(x * x), [rand(5, 48)], {"relu": 1}, left=1)
