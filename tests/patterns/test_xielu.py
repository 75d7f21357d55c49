"""xielu: an activation whose slopes are parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

check = partial(check_pass, only=("xielu",))


def inputs_of(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    numbers = torch.tensor([0.3, -1.2, 0.5, -1e-6]).to(dtype)
    return [4 * rand(BATCH, LENGTH, 48, dtype=dtype), numbers[:1], numbers[1:2], numbers[2], numbers[3]]


def code(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Any:
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


def without_softplus(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Any:
    n = beta + F.softplus(alpha_n)
    return torch.where(x > 0, alpha_p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


def without_beta(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Any:
    p, n = F.softplus(alpha_p), F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


def from_another_edge(x: Any, alpha_p: Any, alpha_n: Any, beta: Any, eps: Any) -> Any:
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 1, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    check(code, inputs_of(dtype), {"xielu": 1}, dynamic=dynamic)


@pytest.mark.parametrize("other", [without_softplus, without_beta, from_another_edge])
def test_near_miss(other: Callable[..., Any]) -> None:
    check(other, inputs_of(), {}, left=None)


def test_guard_on_slopes_of_their_own_for_each_column() -> None:
    x, alpha_p, *rest = inputs_of()
    check(code, [x, alpha_p.expand(48).contiguous(), *rest], {}, left=None, refused={"xielu": "not one number each"})


def test_guard_on_slopes_of_another_dtype() -> None:
    x, alpha_p, alpha_n, *rest = inputs_of()
    refused = {"xielu": "another dtype"}
    check(code, [x, alpha_p.float(), alpha_n.float(), *rest], {}, left=None, refused=refused)
