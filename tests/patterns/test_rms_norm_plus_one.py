"""rms_norm_plus_one: (1 + weight) in float32, one cast at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

EPS = blocks.EPS


def weight_plus_one_first(x: Any, w: Any) -> Any:
    wide = x.float()
    factor = w.float() + 1
    return (factor * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


@everywhere
@pytest.mark.parametrize("code", [blocks.rms_norm_plus_one, weight_plus_one_first])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 64, dtype=dtype), rand(64, dtype=dtype)]
    check_pass(code, inputs, {"rms_norm_plus_one": 1}, dynamic=dynamic)


@pytest.mark.parametrize("module", [Gemma2RMSNorm, Gemma3RMSNorm])
def test_modules_of_transformers(module: Callable[..., torch.nn.Module]) -> None:
    norm = module(64, eps=1e-6).to(BF16)
    torch.nn.init.normal_(norm.weight)
    check_pass(norm, [rand(2, 5, 64)], {"rms_norm_plus_one": 1})


def test_float32_weight() -> None:
    check_pass(blocks.rms_norm_plus_one, [rand(5, 64), rand(64, dtype=FP32)], {"rms_norm_plus_one": 1})


def test_near_miss_one_is_added_in_half_precision() -> None:
    """1 + weight rounded to bf16 is another weight: what multiplies is the sum, not the weight."""

    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w)).to(x.dtype)

    outcome = check_pass(code, [rand(5, 64), rand(64)], {"rms_norm_cast_last": 1}, left=1)
    assert outcome.chosen[0].match.inputs["weight"].target is torch.ops.aten.add.Tensor


def test_near_miss_two_is_added() -> None:
    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (2.0 + w.float())).to(x.dtype)

    inputs = [rand(5, 64), rand(64)]
    check_pass(
        code,
        inputs,
        {},
        left=None,
        only=["rms_norm_plus_one"],
        refused={"rms_norm_plus_one": "is 2.0, not 1"},
    )


def test_guard_on_a_weight_that_is_no_row() -> None:
    check_pass(
        blocks.rms_norm_plus_one,
        [rand(64, 64), rand(64, 1)],
        {},
        left=None,
        refused={"rms_norm_plus_one": "weight (is|has)"},
    )


def test_one_weight_for_several_norms_is_summed_once() -> None:
    """1 + weight has several readers, so each norm takes it as its weight."""

    def code(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = torch.tanh(blocks.rms_norm_plus_one(x, w))
        return x

    check_pass(code, [rand(5, 64), rand(64)], {"rms_norm_cast_last": 3}, left=5)
