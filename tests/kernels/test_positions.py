"""padded_positions against counting by hand, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import EXACT, Rounding
from inputs import INVENTORY

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAME = "padded_positions"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def run(ids: torch.Tensor, padding_idx: int, past: int) -> Any:
    return INVENTORY.entry_point(NAME)(ids, padding_idx, past)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("padding_idx", "past"), [(1, 0), (0, 7), (3, 512)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 1500)])
def test_counts_the_tokens_of_a_row(shape, padding_idx, past, device):
    ids = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(0))
    ((right, _),) = EXACT[NAME](Rounding.of(torch.float32), NAME, ids, padding_idx, past)
    assert torch.equal(run(ids.to(device), padding_idx, past).cpu(), right)


def test_ids_of_any_strides_and_width():
    ids = torch.tensor([[5, 1], [1, 9], [8, 8]], dtype=torch.int32).T
    assert run(ids, 1, 2).tolist() == [[4, 1, 5], [1, 4, 5]]


def test_no_ids_launch_nothing():
    with recorded() as launches:
        assert run(torch.zeros(0, 5, dtype=torch.long), 1, 0).shape == (0, 5)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    with recorded() as launches:
        run(torch.empty(8, 512, dtype=torch.long, device="meta"), 1, 0)
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
