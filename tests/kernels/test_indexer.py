"""indexer_scores against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAME = "indexer_scores"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One query; tiles that stick out of keys, queries, heads and columns; more heads than rows of a product.
SIZES = ({"S": 1, "T": 70, "Hd": 4, "D": 24}, {"S": 19, "T": 150, "Hd": 20}, {"S": 9, "T": 33, "Hd": 64, "D": 128})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64(dtype, device):
    def run(**inputs: Any) -> torch.Tensor:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(NAME)(**moved).cpu()

    for sizes in SIZES:
        assert worst(run, NAME, make_inputs(NAME, dtype, "ordinary", "as trained", sizes), dtype) <= 1


def test_strides_are_taken_as_they_are():
    inputs = make_inputs(NAME, torch.bfloat16, "ordinary", "as trained", {})
    expected = INVENTORY.entry_point(NAME)(**inputs)
    turned = {
        **inputs,
        "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
        "k": inputs["k"].mT.contiguous().mT,
    }
    assert torch.equal(INVENTORY.entry_point(NAME)(**turned), expected)


def test_no_queries_launch_nothing():
    with recorded() as launches:
        out = INVENTORY.entry_point(NAME)(torch.ones(1, 0, 4, 16), torch.ones(1, 5, 16), torch.ones(1, 0, 4), 1.0)
    assert out.shape == (1, 0, 5)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    dtype, queries = DTYPES[place % 3], (64, 1)[place // 2]
    q, k = (torch.empty(1, *shape, dtype=dtype, device="meta") for shape in ((queries, 64, 128), (4096, 128)))
    with recorded() as launches:
        INVENTORY.entry_point(NAME)(q, k, torch.empty(1, queries, 64, device="meta"), 0.5)
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
