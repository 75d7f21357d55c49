"""Grouped linears against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.launch import recorded

NAMES = ("grouped_linear", "grouped_linear_in_first")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, device):
    def run(**inputs):
        return INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in ({"N": 12}, {"N": 70, "I": 24, "O": 72}, {"N": 1, "E": 9}, {"N": 300, "E": 2, "I": 72}):
        assert worst(run, name, make_inputs(name, dtype, "ordinary", "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_rows_are_passed_over(device):
    rows, weight = torch.randn(6, 8), torch.randn(5, 16, 8)
    ends = torch.tensor([0, 4, 4, 6, 6], dtype=torch.int32)
    got = INVENTORY.entry_point("grouped_linear")(rows.to(device), weight.to(device), ends.to(device)).cpu()
    torch.testing.assert_close(got, torch.cat((rows[:4] @ weight[1].T, rows[4:] @ weight[3].T)))


def test_no_rows_launch_nothing():
    with recorded() as launches:
        ends = torch.zeros(3, dtype=torch.int32)
        assert INVENTORY.entry_point("grouped_linear")(torch.ones(0, 8), torch.ones(3, 4, 8), ends).shape == (0, 4)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    dtype, rows = DTYPES[place % 3], (16, 4096)[place // 2]
    x, weight = torch.empty(rows, 256, dtype=dtype, device="meta"), torch.empty(8, 256, 256, dtype=dtype, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point(NAMES[place % 2])(x, weight, torch.empty(8, dtype=torch.int32, device="meta"))
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
