"""The update of a static cache beside index_copy, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cache_kernels import assert_moves_every_bit
from inputs import DTYPES, INVENTORY

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import Launch, recorded

NAME = "cache_write"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One token and several, widths that fill a tile and others, values of another width, nothing at all.
SIZES = (
    {"B": 1, "Hk": 8, "S": 1, "T": 33, "D": 128, "Dv": 128}, {"B": 2, "Hk": 3, "S": 5, "T": 40, "D": 80, "Dv": 64},
    {"B": 1, "Hk": 1, "S": 3, "T": 7, "D": 5, "Dv": 6}, {"B": 3, "Hk": 9, "S": 40, "T": 41, "D": 16, "Dv": 256},
    {"B": 1, "Hk": 2, "S": 0, "T": 7, "D": 16, "Dv": 16}, {"B": 1, "Hk": 2, "S": 2, "T": 7, "D": 16, "Dv": 0},
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> Any:
    return sys.modules[INVENTORY.entry_point(NAME).__module__]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_moves_every_bit_to_its_place(sizes: dict[str, int], dtype: torch.dtype, device: str) -> None:
    assert_moves_every_bit(NAME, sizes, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_outside_of_the_cache_is_written_nowhere(kernels: Any, device: str) -> None:
    keys, values = torch.zeros(2, 1, 2, 5, 16, device=device)
    k, v = torch.ones(2, 1, 2, 3, 16, device=device)
    kernels.cache_write_(k, v, keys, values, torch.tensor([4, 5, 6], device=device))
    assert keys[:, :, 4].eq(1).all()
    assert keys.sum() == values.sum() == 2 * 16


def launch_of(kernels: Any, dtype: torch.dtype, length: int, heads: int, width: int) -> Launch:
    make = {"dtype": dtype, "device": "meta"}
    k = torch.empty(1, length, heads, width, **make).transpose(1, 2)
    cache = torch.empty(1, heads, 2112, width, **make)
    positions = torch.empty(length, dtype=torch.int64, device="meta")
    with recorded() as launches:
        kernels.cache_write_(k, k, cache, cache.clone(), positions)
    (launch,) = launches
    return launch


def test_a_decode_step_is_one_block_for_each_group_of_heads(kernels: Any) -> None:
    assert launch_of(kernels, torch.bfloat16, 1, 8, 128).grid == (1, 2, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels: Any, arch: str) -> None:
    for case in ((torch.bfloat16, 1, 8, 128), (torch.float16, 64, 8, 80), (torch.float32, 1, 4, 256)):
        launch = launch_of(kernels, *case)
        assert compile_kernel(launch.kernel, launch.args, arch)
