"""layer_norm: aten.layer_norm over the last dimension with weight and bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, INVENTORY, LENGTH, check_pass, everywhere, rand
from torch import nn

from tilegym_fx.pattern import forms_of


def code(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 64, dtype=dtype), rand(64, dtype=dtype), rand(64, dtype=dtype, seed=1)]
    check_pass(code, inputs, {"layer_norm": 1}, dynamic=dynamic)


@pytest.mark.parametrize("shape", [(576,), (5, 4544), (2, 5, 4, 80), (1, 1)], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    check_pass(code, [rand(*shape), rand(shape[-1]), rand(shape[-1], seed=1)], {"layer_norm": 1})


def test_the_module_of_torch_and_its_eps() -> None:
    outcome = check_pass(nn.LayerNorm(64, eps=0.125).to(BF16), [rand(2, 5, 64)], {"layer_norm": 1})
    assert outcome.chosen[0].match.inputs["eps"] == 0.125


def test_float32_norm_in_a_half_precision_model() -> None:
    def wide(x: Any, weight: Any, bias: Any) -> Any:
        return code(x.float(), weight, bias).to(x.dtype)

    inputs = [rand(5, 64), rand(64, dtype=FP32), rand(64, dtype=FP32, seed=1)]
    outcome = check_pass(wide, inputs, {"layer_norm": 1}, left=2)
    assert outcome.chosen[0].match.kind == "compatible"


@pytest.mark.parametrize("module", [nn.LayerNorm(64, elementwise_affine=False), nn.LayerNorm(64, bias=False)])
def test_near_miss_without_weight_or_bias(module: nn.Module) -> None:
    refused = {"layer_norm": "layer_norm reads tensors: [12], and in the pattern 3"}
    check_pass(module.to(BF16), [rand(5, 64)], {}, left=1, refused=refused)


def test_near_miss_over_two_dimensions() -> None:
    """A pattern of one call is told too where that call has other arguments."""
    refused = {"layer_norm": "argument normalized_shape.length of layer_norm is 2, not 1"}
    check_pass(nn.LayerNorm((5, 64)).to(BF16), [rand(2, 5, 64)], {}, left=1, refused=refused)


def test_guard_on_a_weight_that_is_no_row() -> None:
    """torch refuses such a weight itself, so no graph has one."""
    (guard,) = next(forms_of(INVENTORY, "layer_norm")).guards
    inputs = {"hidden_states": rand(5, 64), "weight": rand(64), "bias": rand(64), "eps": 1e-5}
    said = guard(**{**inputs, "weight": rand(1)})
    assert said == "weight is [1], not [H] with H = 64: the kernel does not broadcast"
    assert guard(**inputs) is None
