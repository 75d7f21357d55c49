"""A full cache moved up by one token beside torch's roll, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cache_kernels import assert_moves_every_bit
from inputs import DTYPES, INVENTORY

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import Launch, recorded

NAME = "cache_roll_write"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Widths that strips divide and others, values of another width, one token, nothing at all.
SIZES = (
    {"B": 1, "Hk": 4, "T": 255, "D": 128, "Dv": 128}, {"B": 2, "Hk": 3, "T": 40, "D": 80, "Dv": 64},
    {"B": 1, "Hk": 1, "T": 7, "D": 5, "Dv": 6}, {"B": 3, "Hk": 2, "T": 65, "D": 72, "Dv": 256},
    {"B": 2, "Hk": 2, "T": 1, "D": 16, "Dv": 16}, {"B": 1, "Hk": 2, "T": 2, "D": 16, "Dv": 16},
    {"B": 1, "Hk": 2, "T": 9, "D": 16, "Dv": 0},
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> Any:
    return sys.modules[INVENTORY.entry_point(NAME).__module__]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_moves_every_bit_to_its_place(sizes: dict[str, int], dtype: torch.dtype, device: str) -> None:
    assert_moves_every_bit(NAME, sizes, dtype, device)


def caches(held: int, width: int, device: str) -> list[torch.Tensor]:
    new = torch.randn(2, 2, 3, 1, width, device=device)
    return [*new, *torch.randn(2, 2, 3, held, width, device=device)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("held", [5, 8, 9, 10, 12, 13, 17, 31, 33])
@pytest.mark.parametrize("columns", [4, 8])
def test_tiles_meet_wherever_the_last_one_ends(kernels: Any, held: int, columns: int, device: str) -> None:
    """No place is read after it was written: tiles of four tokens, of which the last two may share some."""
    inputs = caches(held, 24, device)
    expected = INVENTORY.reference(NAME)(*inputs)
    kernel = kernels.cache_roll_write_in_place_kernel
    kernels.run_cache_roll_write(kernel, tuple(inputs), kernels.Tile(4, columns, True))
    assert all(map(torch.equal, inputs[2:], expected))


@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_leave_the_newest_tokens(kernels: Any, device: str) -> None:
    _, _, keys, values = caches(7, 16, device)
    tokens = torch.randn(10, 2, 2, 3, 1, 16, device=device)
    for k, v in tokens:
        kernels.cache_roll_write_(k, v, keys, values)
    assert torch.equal(keys, torch.cat([*tokens[3:, 0]], dim=2))
    assert torch.equal(values, torch.cat([*tokens[3:, 1]], dim=2))


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_projection_and_of_a_cache_are_taken_as_they_are(kernels: Any, device: str) -> None:
    kv = torch.randn(2, 1, 2 * 3 * 32, device=device)
    k, v = (x.view(2, 1, 3, 32).transpose(1, 2) for x in kv.chunk(2, dim=-1))
    keys, values = torch.randn(2, 10, 2, 3, 40, device=device)[..., :32].permute(2, 0, 3, 1, 4)
    expected = INVENTORY.reference(NAME)(k, v, keys, values)
    assert all(map(torch.equal, kernels.cache_roll_write(k, v, keys, values), expected))
    kernels.cache_roll_write_(k, v, keys, values)
    assert all(map(torch.equal, (keys, values), expected))


@pytest.mark.parametrize(
    ("held", "width", "heads", "tokens", "columns"),
    [(2047, 96, 32, 1024, 16), (1024, 256, 4, 512, 32), (4095, 128, 8, 512, 32), (2047, 96, 256, 512, 32)],
)
def test_strips_use_the_gpu_evenly(kernels: Any, held: int, width: int, heads: int, tokens: int, columns: int) -> None:
    assert kernels.choose_tile(held, (width, width), 2, heads, 132) == kernels.Tile(tokens, columns, True)


def launches_of(kernels: Any, dtype: torch.dtype, heads: int, held: int, width: int) -> list[Launch]:
    make = {"dtype": dtype, "device": "meta"}
    k = torch.empty(1, 1, heads, width, **make).transpose(1, 2)
    cache = torch.empty(1, heads, held, width, **make)
    with recorded() as launches:
        kernels.cache_roll_write_(k, k, cache, cache.clone())
        kernels.cache_roll_write(k, k, cache, cache.clone())
    return launches


def test_a_step_is_one_launch_for_keys_and_values(kernels: Any) -> None:
    in_place, _ = launches_of(kernels, torch.bfloat16, 32, 2047, 96)
    assert in_place.grid == (2 * 96 // 16, 32, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels: Any, arch: str) -> None:
    cases = ((torch.bfloat16, 32, 2047, 96), (torch.float16, 8, 1, 80), (torch.float32, 4, 1023, 6))
    for case in cases:
        for launch in launches_of(kernels, *case):
            assert compile_kernel(launch.kernel, launch.args, arch)
