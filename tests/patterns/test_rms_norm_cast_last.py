"""rms_norm_cast_last: the weight multiplies in float32, one cast at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

EPS = blocks.EPS


def weight_widened_by_hand(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w.float()).type_as(x)


def in_one_operation(x: Any, w: Any) -> Any:
    return F.rms_norm(x, (64,), w)


@everywhere
@pytest.mark.parametrize("code", [blocks.rms_norm_cast_last, weight_widened_by_hand, in_one_operation])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    """In float32 there is no cast to tell it from rms_norm, which is then as good."""
    expected = {"rms_norm_cast_last": 1} if dtype == BF16 else {"rms_norm": 1}
    check_pass(code, [rand(BATCH, LENGTH, 64, dtype=dtype), rand(64, dtype=dtype)], expected, dynamic=dynamic)


def test_in_float32_it_fits_too() -> None:
    inputs = [rand(5, 64, dtype=FP32), rand(64, dtype=FP32)]
    check_pass(blocks.rms_norm, inputs, {"rms_norm_cast_last": 1}, only=["rms_norm_cast_last"])


@pytest.mark.parametrize("module", [Olmo2RMSNorm, GptOssRMSNorm])
def test_modules_of_transformers(module: Callable[..., torch.nn.Module]) -> None:
    check_pass(module(64, eps=1e-5).to(BF16), [rand(2, 5, 64)], {"rms_norm_cast_last": 1})


@pytest.mark.parametrize(("eps", "expected"), [(None, torch.finfo(FP32).eps), (1e-6, 1e-6)])
def test_the_module_of_torch(eps: float | None, expected: float) -> None:
    """Without an eps it is that of the dtype that is computed in, not of the rows."""
    outcome = check_pass(torch.nn.RMSNorm(64, eps).to(BF16), [rand(2, 5, 64)], {"rms_norm_cast_last": 1})
    assert outcome.chosen[0].match.inputs["eps"] == expected


@pytest.mark.parametrize(
    ("module", "rows", "reason"),
    [
        (torch.nn.RMSNorm((5, 64)).to(BF16), rand(2, 5, 64), "argument dim.length of .* is 2, not 1"),
        (torch.nn.RMSNorm(64).double(), rand(2, 5, 64, dtype=torch.float64), "traced at these inputs it differs"),
    ],
    ids=["two axes", "float64"],
)
def test_near_miss_the_module_of_torch(module: torch.nn.Module, rows: torch.Tensor, reason: str) -> None:
    check_pass(module, [rows], {}, left=None, refused={"rms_norm_cast_last": reason})


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("code", [blocks.rms_norm_cast_last, in_one_operation])
def test_float32_weight(code: Callable[..., Any]) -> None:
    """No promotion is left to tell: the result is cast down all the same."""
    inputs = [rand(5, 64), rand(64, dtype=FP32)]
    outcome = check_pass(code, inputs, {"rms_norm_cast_last": 1})
    assert outcome.chosen[0].match.outputs[0].meta["val"].dtype == BF16


def test_near_miss_the_cast_comes_before_the_weight() -> None:
    check_pass(blocks.rms_norm, [rand(5, 64), rand(64)], {}, left=None, only=["rms_norm_cast_last"])


def test_near_miss_the_weight_is_rounded_first() -> None:
    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (normal * w.to(BF16).float()).to(x.dtype)

    check_pass(code, [rand(5, 64), rand(64, dtype=FP32)], {"rms_norm_cast_last": 1}, left=1)


def test_guard_on_a_weight_that_is_no_row() -> None:
    check_pass(
        blocks.rms_norm_cast_last,
        [rand(64, 64), rand(64, 1)],
        {},
        left=None,
        refused={"rms_norm_cast_last": "weight (is|has)"},
    )


def test_one_weight_for_several_norms() -> None:
    """Its cast is shared, and goes when no norm needs it any more."""

    def code(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = torch.tanh(blocks.rms_norm_cast_last(x, w))
        return x

    check_pass(code, [rand(5, 64), rand(64)], {"rms_norm_cast_last": 3}, left=3)
