"""The gated activation kernel against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("gelu_mul", "gelu_tanh_mul", "silu_mul", "silu_mul_packed")
SEPARATE = NAMES[:3]
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Whole tiles, a ragged last tile, columns that no vector load divides, and hardly anything.
SIZES = ({"N": 2, "I": 3072}, {"N": 3, "I": 2880}, {"N": 5, "I": 517}, {"N": 2, "I": 3})


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("silu_mul").__module__]


def on(device: str, name: str) -> Any:
    def run(**inputs: torch.Tensor) -> torch.Tensor:
        return INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_on_gates_of_every_magnitude(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS:
            inputs = make_inputs(name, dtype, rows, "as trained", sizes)
            assert worst(on(device, name), name, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_activation_is_rounded_before_the_product(name, device):
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"N": 4, "I": 4096})
    got, expected = on(device, name)(**inputs), INVENTORY.reference(name)(**inputs)
    assert (got != expected).float().mean() < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_gelu_is_exact_to_2e_7_in_float32(device):
    gate = torch.linspace(-14, 14, 200_001)
    got = on(device, "gelu_mul")(gate=gate, up=torch.ones_like(gate)).double()
    exact = gate.double() / 2 * torch.erfc(-gate.double() / math.sqrt(2))
    assert ((got - exact).abs() <= 2e-7 + 1e-7 * exact.abs()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gelu_mul", "gelu_tanh_mul"])
def test_gelu_keeps_its_digits_far_below_zero(name, device):
    """Where 0.5 * x * (1 + erf) cancels, relative accuracy is kept."""
    gate = torch.linspace(-5, -1, 5001)
    got = on(device, name)(gate=gate, up=torch.ones_like(gate)).double()
    wide = gate.double()
    if name == "gelu_mul":
        exact = wide / 2 * torch.erfc(-wide / math.sqrt(2))
    else:
        exact = wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    assert ((got / exact - 1).abs() < 1e-5).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SEPARATE)
def test_extreme_gates_saturate_and_a_nan_stays_where_it_is(name, device):
    gate = torch.tensor([-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, math.nan, 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        got = on(device, name)(gate=gate.to(dtype), up=torch.ones(8, dtype=dtype)).float()
        assert (got[:4].abs() < 1e-30).all()
        assert torch.equal(got[4:6], gate[4:6].to(dtype).float())
        assert got.isnan().tolist() == [False] * 6 + [True, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SEPARATE)
def test_rows_at_any_distance_are_read_in_place(name, device):
    packed = torch.randn(2, 3, 2 * 2100, dtype=torch.bfloat16, device=device)
    gate, up = packed.chunk(2, dim=-1)
    function = INVENTORY.entry_point(name)
    got = function(gate, up)
    assert got.is_contiguous()
    assert torch.equal(got, function(gate.contiguous(), up.contiguous()))


def test_the_halves_of_a_packed_projection_are_not_copied():
    packed = torch.randn(2, 3, 2 * 2048)
    with recorded() as launches:
        INVENTORY.entry_point("silu_mul_packed")(packed)
    gate, up = launches[0].args[:2]
    assert gate.data_ptr() == packed.data_ptr()
    assert up.data_ptr() == packed.data_ptr() + 4 * 2048


@pytest.mark.parametrize("device", DEVICES)
def test_strides_that_no_matrix_can_express_are_copied(device):
    gate = torch.randn(4, 6, 5, device=device).permute(1, 0, 2)
    up = torch.randn(1, 1, 5, device=device).expand(6, 4, 5)
    function = INVENTORY.entry_point("silu_mul")
    assert torch.equal(function(gate, up), function(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("name", SEPARATE)
def test_mixed_dtypes_are_promoted_like_the_references(name):
    for left, right in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
        inputs = {"gate": torch.randn(3, 50).to(left), "up": torch.randn(3, 50).to(right)}
        expected = INVENTORY.reference(name)(**inputs)
        torch.testing.assert_close(INVENTORY.entry_point(name)(**inputs), expected, rtol=2**-7, atol=1e-6)


def test_no_elements_launch_nothing():
    with recorded() as launches:
        assert INVENTORY.entry_point("silu_mul")(torch.randn(0, 8), torch.randn(0, 8)).shape == (0, 8)
        assert INVENTORY.entry_point("silu_mul_packed")(torch.randn(2, 0, 8)).shape == (2, 0, 4)
    assert launches == []


def test_contiguous_operands_are_one_row_unless_too_long_for_32_bits(kernels):
    with recorded() as launches:
        for rows in (64, 2**20):
            operand = torch.empty(rows, 14336, dtype=torch.bfloat16, device="meta")
            kernels.silu_mul(operand, operand)
    assert launches[0].args[0].shape == (1, 64 * 14336)
    assert launches[1].args[0].shape == (2**20, 14336)
    assert launches[1].grid == (2**20 * 7,)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    for index, name in enumerate(SEPARATE):
        dtype = DTYPES[(index + ARCHITECTURES.index(arch)) % 3]
        operand = torch.empty(16, 14336, dtype=dtype, device="meta")
        with recorded() as launches:
            INVENTORY.entry_point(name)(operand, operand)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
