"""The kernel of xielu against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Whole tiles, a ragged last tile, and hardly anything.
SIZES = ({"N": 2, "I": 3072}, {"N": 5, "I": 517}, {"N": 2, "I": 3})


def on(device: str) -> Any:
    return lambda **inputs: INVENTORY.entry_point("xielu")(**{k: v.to(device) for k, v in inputs.items()}).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64_at_every_magnitude(dtype, device):
    for sizes in SIZES:
        for rows in ROWS:
            assert worst(on(device), "xielu", make_inputs("xielu", dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", [-30.0, -12.0, 0.0, 12.0, 30.0])
def test_slopes_keep_their_digits_and_so_does_what_is_below_zero(alpha, device):
    """Where exp(x) - 1 - x cancels it is about x^2 / 2; without beta nothing hides it."""
    x = torch.cat((-torch.logspace(-4, 1, 401), torch.logspace(-4, 1, 401)))
    slopes = torch.tensor([alpha]), torch.tensor([alpha])
    got = on(device)(hidden_states=x, alpha_p=slopes[0], alpha_n=slopes[1], beta=torch.zeros(()), eps=torch.zeros(()))
    wide, slope = x.double(), torch.nn.functional.softplus(slopes[0].double())
    exact = slope * torch.where(wide > 0, wide**2, torch.expm1(wide) - wide)
    assert ((got / exact - 1).abs() < 2e-6).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_stays_where_it_is_and_infinity_above(device):
    x = torch.tensor([math.nan, math.inf, 1.0, -1.0])
    inputs = make_inputs("xielu", torch.float32, "ordinary", "as trained", {}) | {"hidden_states": x}
    got = on(device)(**inputs)
    assert got.isnan().tolist() == [True, False, False, False]
    assert got[1] == math.inf


def test_strides_that_are_not_dense_are_copied_and_no_elements_launch_nothing():
    inputs = make_inputs("xielu", torch.float32, "ordinary", "as trained", {"N": 8, "I": 50})
    function = INVENTORY.entry_point("xielu")
    odd = inputs["hidden_states"][..., ::2]
    got = function(**{**inputs, "hidden_states": odd})
    assert torch.equal(got, function(**{**inputs, "hidden_states": odd.contiguous()}))
    with recorded() as launches:
        assert function(**{**inputs, "hidden_states": odd[:0]}).shape == (0, 25)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    inputs = make_inputs("xielu", dtype, "ordinary", "as trained", {"N": 4, "I": 1500})
    with recorded() as launches:
        INVENTORY.entry_point("xielu")(**inputs)
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
