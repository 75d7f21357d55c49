"""gated_rms_norm, gated_rms_norm_fp32: the gate before the norm, and what comes near."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand

NAMES = ("gated_rms_norm", "gated_rms_norm_fp32")
EPS, WIDTH = 1e-5, 48
check = partial(check_pass, only=NAMES)


def norm(x: Any, gate: Any, weight: Any, *, groups: int = 4, act: Any = F.silu) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * act(gate.to(torch.float32))
    parts = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * parts.view(*x.shape).to(dtype)


def norm_of_wide(x: Any, gate: Any, weight: Any, **options: Any) -> Any:
    return norm(x, gate, weight, **options).to(gate.dtype)


def rows(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [rand(BATCH, LENGTH, WIDTH, dtype=dtype), rand(BATCH, LENGTH, WIDTH, dtype=dtype, seed=1), rand(WIDTH)]


@everywhere
def test_hits(dtype: torch.dtype, dynamic: bool) -> None:
    x, gate, weight = rows(dtype)
    outcome = check(norm, [x, gate, weight.to(dtype)], {"gated_rms_norm": 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["groups"] == 4


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("groups", [1, 4])
def test_float32_states_under_a_16_bit_gate(groups: int, dynamic: bool) -> None:
    x, gate, weight = rows()
    inputs = [x.float(), gate, weight]
    outcome = check(partial(norm_of_wide, groups=groups), inputs, {"gated_rms_norm_fp32": 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["groups"] == groups


def test_near_miss_another_gate() -> None:
    check(partial(norm, act=torch.sigmoid), rows(), {}, left=None)


def test_near_miss_the_gate_after_the_norm() -> None:
    def code(x: Any, gate: Any, weight: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * (wide * F.silu(gate.float())).to(x.dtype)

    check(code, rows(), {}, left=None)


def test_near_miss_the_weight_before_the_groups() -> None:
    def code(x: Any, gate: Any, weight: Any) -> Any:
        parts = (x.float() * F.silu(gate.float()) * weight).view(BATCH, LENGTH, 4, WIDTH // 4)
        return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + EPS)).view(x.shape).to(x.dtype)

    check(code, rows(), {}, left=None)


def test_near_miss_rounded_to_another_dtype() -> None:
    """The float32 norm is taken alone, and the cast stays."""
    x, gate, weight = rows()
    code = lambda x, g, w: norm(x, g, w).to(torch.float16)  # noqa: E731
    check(code, [x.float(), gate, weight.to(FP32)], {"gated_rms_norm": 1}, left=None)


def test_guard_the_gate_is_one_row() -> None:
    x, gate, weight = rows()
    check(norm, [x, gate[0, 0], weight], {}, left=None, refused={"gated_rms_norm": "gate"})
