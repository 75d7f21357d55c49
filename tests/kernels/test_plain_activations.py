"""The plain activation kernel against float64, through the interpreter and, marked gpu, on a GPU."""

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

NAMES = ("gelu", "gelu_new", "gelu_tanh", "relu", "relu_squared")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Whole tiles, a ragged last tile, and hardly anything.
SIZES = ({"N": 2, "I": 3072}, {"N": 5, "I": 517}, {"N": 2, "I": 3})


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("gelu").__module__]


def on(device: str, name: str) -> Any:
    return lambda hidden_states: INVENTORY.entry_point(name)(hidden_states.to(device)).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_magnitude(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS:
            assert worst(on(device, name), name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_keeps_its_digits_far_below_zero(name, device):
    """Where 0.5 * x * (1 + erf) cancels, relative accuracy is kept."""
    x = torch.linspace(-5, -1, 5001)
    got, wide = on(device, name)(x).double(), x.double()
    if name == "gelu":
        exact = wide / 2 * torch.erfc(-wide / math.sqrt(2))
    else:
        exact = wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    assert ((got / exact - 1).abs() < 1e-5).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_values_saturate_and_a_nan_stays_where_it_is(name, device):
    x = torch.tensor([-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, math.nan, 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        got = on(device, name)(x.to(dtype)).float()
        assert (got[:4].abs() < 1e-30).all()
        assert (got[4:6] >= x[4:6].to(dtype).float()).all()
        assert got.isnan().tolist() == [False] * 6 + [True, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_infinity_stays_infinity(name, device):
    for dtype in (torch.float32, torch.bfloat16):
        assert on(device, name)(torch.tensor([math.inf, 1.0], dtype=dtype))[0] == math.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gelu_mul", "gelu_tanh_mul", "silu_mul"])
def test_a_gate_of_infinity_is_open(name, device):
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = torch.tensor([math.inf, 1.0], dtype=dtype), torch.tensor([2.0, 1.0], dtype=dtype)
        assert INVENTORY.entry_point(name)(gate.to(device), up.to(device)).cpu()[0] == math.inf


def test_strides_that_are_not_dense_are_copied():
    x = torch.randn(4, 6, 50).permute(1, 0, 2)[..., ::2]
    got = INVENTORY.entry_point("gelu")(x)
    assert got.is_contiguous()
    assert torch.equal(got, INVENTORY.entry_point("gelu")(x.contiguous()))


def test_no_elements_launch_nothing():
    with recorded() as launches:
        assert INVENTORY.entry_point("gelu")(torch.randn(0, 8)).shape == (0, 8)
    assert launches == []


def test_a_contiguous_operand_is_one_row_unless_too_long_for_32_bits(kernels):
    with recorded() as launches:
        for rows in (64, 2**20):
            kernels.gelu(torch.empty(rows, 14336, dtype=torch.bfloat16, device="meta"))
    assert launches[0].args[0].shape == (1, 64 * 14336)
    assert launches[1].args[0].shape == (2**20, 14336)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    for index, name in enumerate(NAMES):
        dtype = DTYPES[(index + ARCHITECTURES.index(arch)) % 3]
        with recorded() as launches:
            INVENTORY.entry_point(name)(torch.empty(16, 14336, dtype=dtype, device="meta"))
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
