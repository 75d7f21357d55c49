"""linear_fp32 and linear_fp32_weight: 16-bit rows that are multiplied and summed in float32, as routers do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, LENGTH, check_pass, rand

check = partial(check_pass, only=("linear_fp32", "linear_fp32_weight", "linear"))


def wide(x: Any, weight: Any) -> Any:
    return F.linear(x.type(torch.float32), weight.float())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    x, weight = rand(BATCH, LENGTH, 16, dtype=dtype), rand(24, 16, dtype=dtype)
    check(wide, [x, weight], {"linear_fp32": 1}, dynamic=dynamic)


def test_rows_that_others_read_in_float32_too_keep_their_cast() -> None:
    def code(x: Any, weight: Any) -> Any:
        rows = x.float()
        return F.linear(rows, weight.float()), rows.sum()

    check(code, [rand(5, 16), rand(24, 16)], {"linear_fp32": 1}, left=2)


def test_near_miss_operands_that_are_float32_are_a_linear() -> None:
    inputs = [rand(5, 16, dtype=torch.float32), rand(24, 16, dtype=torch.float32)]
    check(wide, inputs, {"linear": 1}, refused={"linear_fp32": "float32 already"})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_hit_a_weight_that_is_float32(dynamic: bool) -> None:
    x, weight = rand(BATCH, LENGTH, 16), rand(24, 16, dtype=torch.float32)
    check(wide, [x, weight], {"linear_fp32_weight": 1}, dynamic=dynamic)


def test_near_miss_rows_that_are_float32_are_a_linear() -> None:
    check(lambda x, w: F.linear(x, w.float()), [rand(5, 16, dtype=torch.float32), rand(24, 16)], {"linear": 1}, left=1)


def test_near_miss_rounded_sums_are_a_linear() -> None:
    check(lambda x, w: F.linear(x, w).float(), [rand(5, 16), rand(24, 16)], {"linear": 1}, left=1)
