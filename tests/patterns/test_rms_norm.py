"""rms_norm: weight * cast(x32 * rsqrt(mean(x32²) + eps))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

EPS = blocks.EPS


def weight_last(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).type_as(x) * w


def own_square(x: Any, w: Any) -> Any:
    wide = x.to(dtype=torch.float32)
    return w * (torch.rsqrt(EPS + torch.mean(wide * wide, -1, True)) * wide).to(x)


def power_of_minus_half(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * (wide.pow(2).mean([-1], keepdim=True) + EPS) ** -0.5).to(x.dtype)


def inverse_root(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * (1 / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def dim_from_the_start(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(x.dim() - 1, keepdim=True) + EPS)).to(x.dtype)


def scaled_by_one(x: Any, w: Any) -> Any:
    return blocks.rms_norm(x.contiguous() * 1.0, w.contiguous())


HITS = [
    blocks.rms_norm,
    weight_last,
    own_square,
    power_of_minus_half,
    inverse_root,
    dim_from_the_start,
    scaled_by_one,
]


@everywhere
@pytest.mark.parametrize("code", HITS)
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, [rand(BATCH, LENGTH, 64, dtype=dtype), rand(64, dtype=dtype)], {"rms_norm": 1}, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(576,), (5, 2880), (2, 5, 3584), (2, 5, 4, 80), (1, 1, 1)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    check_pass(blocks.rms_norm, [rand(*shape), rand(shape[-1])], {"rms_norm": 1})


def test_no_rows_at_all() -> None:
    check_pass(blocks.rms_norm, [rand(0, 64), rand(64)], {"rms_norm": 1})


def test_the_module_of_transformers() -> None:
    check_pass(LlamaRMSNorm(64, eps=3e-6).to(BF16), [rand(2, 5, 64)], {"rms_norm": 1})


def test_eps_is_captured() -> None:
    outcome = check_pass(LlamaRMSNorm(64, eps=0.125).to(BF16), [rand(5, 64)], {"rms_norm": 1})
    assert outcome.chosen[0].match.inputs["eps"] == 0.125


def test_float32_weight_promotes_the_result_as_the_reference_does() -> None:
    outcome = check_pass(blocks.rms_norm, [rand(5, 64), rand(64, dtype=FP32)], {"rms_norm": 1})
    assert outcome.chosen[0].match.outputs[0].meta["val"].dtype == FP32
    assert outcome.chosen[0].match.kind == "compatible"


def test_bfloat16_weight_on_float32_rows() -> None:
    """The weight is widened first, which remains."""
    check_pass(blocks.rms_norm, [rand(5, 64, dtype=FP32), rand(64)], {"rms_norm": 1}, left=1)


def test_module_of_torch_is_another_rounding() -> None:
    """nn.RMSNorm rounds once, behind the weight: that is another Definition's."""
    check_pass(nn.RMSNorm(64, eps=EPS).to(BF16), [rand(5, 64)], {"rms_norm_cast_last": 1})


def mean_over_rows(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + EPS)).to(x.dtype)


def mean_without_keepdim(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1) + EPS)).to(x.dtype)


def sum_of_squares(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype)


def eps_outside_the_root(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide / (torch.sqrt(wide.pow(2).mean(-1, keepdim=True)) + EPS)).to(x.dtype)


def divided_by_the_root(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def fourth_power(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def mean_of_another_value(x: Any, w: Any) -> Any:
    wide, other = x.float(), (x + 1).float()
    return w * (wide * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def all_in_half_precision(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def eps_twice_as_large(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(torch.add(wide.pow(2).mean(-1, keepdim=True), EPS, alpha=2))).to(x.dtype)


MISSES = [
    mean_over_rows,
    mean_without_keepdim,
    sum_of_squares,
    eps_outside_the_root,
    divided_by_the_root,
    fourth_power,
    mean_of_another_value,
    all_in_half_precision,
    eps_twice_as_large,
]


@pytest.mark.parametrize("code", MISSES)
def test_near_miss(code: Callable[..., Any]) -> None:
    check_pass(code, [rand(64, 64), rand(64)], {}, left=None)


def test_the_miss_says_what_differs() -> None:
    check_pass(
        mean_over_rows,
        [rand(64, 64), rand(64)],
        {},
        left=None,
        refused={"rms_norm": r"argument dim.*is -2, not -1"},
    )


@pytest.mark.parametrize("weight", [(1,), (64, 64), (1, 64), (64, 1)], ids=str)
def test_guard_on_a_weight_that_is_no_row(weight: tuple[int, ...]) -> None:
    inputs = [rand(64, 64), rand(*weight)]
    check_pass(blocks.rms_norm, inputs, {}, left=None, refused={"rms_norm": "weight (is|has)"})


def test_eps_in_a_tensor_is_no_literal() -> None:
    def code(x: Any, w: Any, eps: Any) -> Any:
        return blocks.rms_norm(x, w, eps)

    check_pass(code, [rand(5, 64), rand(64), torch.tensor(1e-5)], {}, left=None)


def test_inner_value_also_returned() -> None:
    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        return w * (wide * torch.rsqrt(mean + EPS)).to(x.dtype), mean

    check_pass(code, [rand(5, 64), rand(64)], {}, left=None, refused={"rms_norm": "also read by output"})


def test_two_norms_of_one_value_share_more_than_views_and_casts() -> None:
    def code(x: Any, w: Any, u: Any) -> Any:
        return blocks.rms_norm(x, w), blocks.rms_norm(x, u)

    inputs = [rand(5, 64), rand(64), rand(64, seed=1)]
    check_pass(code, inputs, {}, left=None, refused={"rms_norm": "the inner value .* is also read"})


def test_the_cast_is_also_returned() -> None:
    def code(x: Any, w: Any) -> Any:
        return blocks.rms_norm(x, w), x.float()

    check_pass(code, [rand(5, 64), rand(64)], {"rms_norm": 1}, left=1)


def test_one_norm_after_another() -> None:
    def code(x: Any, w: Any, u: Any) -> Any:
        return blocks.rms_norm(blocks.rms_norm(x, w), u)

    check_pass(code, [rand(5, 64), rand(64), rand(64, seed=1)], {"rms_norm": 2})


def test_one_tensor_for_two_inputs() -> None:
    def code(w: Any) -> Any:
        return blocks.rms_norm(w, w)

    check_pass(code, [rand(64)], {"rms_norm": 1})


def test_whole_numbers() -> None:
    def code(x: Any, w: Any) -> Any:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(w.dtype)

    check_pass(code, [torch.arange(320).view(5, 64), rand(64)], {}, left=None)
