"""Grouped linears against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.launch import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64(dtype, device):
    name = "grouped_linear"

    def run(**inputs):
        return INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in ({"N": 12}, {"N": 70, "I": 24, "O": 72}, {"N": 1, "E": 9}, {"N": 300, "E": 2, "I": 72}):
        assert worst(run, name, make_inputs(name, dtype, "ordinary", "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_experts_without_rows_are_passed_over(device):
    rows, weight = torch.randn(6, 8), torch.randn(5, 16, 8)
    ends = torch.tensor([0, 4, 4, 6, 6], dtype=torch.int32)
    expected = torch.cat((rows[:4] @ weight[1].T, rows[4:] @ weight[3].T))
    for matrices in (weight.mT, weight.mT.contiguous(), torch.stack((weight.mT, weight.mT), dim=-1)[..., 1]):
        got = INVENTORY.entry_point("grouped_linear")(rows.to(device), matrices.to(device), ends.to(device)).cpu()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_rows_for_every_expert(dtype, device):
    def run(**inputs):
        return INVENTORY.entry_point("batched_linear")(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in ({"N": 12}, {"N": 1, "E": 3, "I": 24}, {"N": 70, "E": 2, "O": 8}):
        assert (
            worst(run, "batched_linear", make_inputs("batched_linear", dtype, "ordinary", "as trained", sizes), dtype)
            <= 1
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [24, 2880])
def test_rows_of_a_table(width, device):
    table = torch.randn(50, width).to(torch.bfloat16)
    for ids in (torch.randint(0, 50, (2, 7)), torch.tensor([[3]]), torch.tensor([0, 49, 0], dtype=torch.int32)):
        got = INVENTORY.entry_point("embedding")(ids.to(device), table.to(device), -1).cpu()
        assert torch.equal(got, table[ids])


def test_no_rows_launch_nothing():
    with recorded() as launches:
        ends = torch.zeros(3, dtype=torch.int32)
        assert INVENTORY.entry_point("batched_linear")(torch.ones(2, 0, 8), torch.ones(2, 8, 4)).shape == (2, 0, 4)
        assert INVENTORY.entry_point("embedding")(torch.ones(0, dtype=torch.long), torch.ones(3, 4), -1).shape == (0, 4)
        assert INVENTORY.entry_point("grouped_linear")(torch.ones(0, 8), torch.ones(3, 8, 4), ends).shape == (0, 4)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    dtype, rows = DTYPES[place % 3], (16, 4096)[place // 2]
    x, weight = torch.empty(rows, 256, dtype=dtype, device="meta"), torch.empty(8, 256, 256, dtype=dtype, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point("embedding")(torch.empty(7, dtype=torch.long, device="meta"), x, -1)
        INVENTORY.entry_point("grouped_linear")(x, weight, torch.empty(8, dtype=torch.int32, device="meta"))
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
