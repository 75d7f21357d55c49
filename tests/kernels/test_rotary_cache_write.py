"""The rotary embedding with a cache update against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import Launch, recorded

NAME = "rotary_cache_write"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Head sizes that fill a tile and others, values of another width, head counts that fill a group and others.
SIZES = (
    {"D": 64, "Dv": 64, "Hq": 9, "Hk": 3}, {"D": 80, "Dv": 80, "Hq": 4, "Hk": 4, "S": 5, "T": 40},
    {"D": 96, "Dv": 128, "Hq": 3, "Hk": 1, "S": 1, "T": 7}, {"D": 128, "Dv": 128, "Hq": 8, "Hk": 2, "S": 12, "T": 33},
    {"D": 256, "Dv": 256, "Hq": 16, "Hk": 8, "S": 3}, {"D": 6, "Dv": 5, "Hq": 71, "Hk": 1, "B": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point(NAME).__module__]


def on(device: str, run: Any) -> Any:
    def call(**inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = run(**{k: v.to(device) for k, v in inputs.items()})
        return tuple(r.cpu() for r in result)

    return call


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64_at_every_kind_of_head(kernels: Any, dtype: torch.dtype, device: str) -> None:
    for sizes in SIZES:
        for rows in ROWS if sizes["D"] == 64 else ("ordinary",):
            inputs = make_inputs(NAME, dtype, rows, "as trained", sizes)
            assert worst(on(device, kernels.rotary_cache_write), NAME, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_place_gives_what_the_copy_gives(
    kernels: Any, sizes: dict[str, int], dtype: torch.dtype, device: str
) -> None:
    inputs = make_inputs(NAME, dtype, "ordinary", "as trained", sizes)
    inputs = {k: v.to(device) for k, v in inputs.items()}
    before = {k: v.clone() for k, v in inputs.items()}
    expected = kernels.rotary_cache_write(**inputs)
    assert all(torch.equal(inputs[k], before[k]) for k in inputs)
    q_out = kernels.rotary_cache_write_(**inputs)
    assert all(map(torch.equal, (q_out, inputs["keys"], inputs["values"]), expected))
    assert all(torch.equal(inputs[k], before[k]) for k in inputs if k not in ("keys", "values"))


@pytest.mark.parametrize("device", DEVICES)
def test_it_rotates_as_the_rotary_kernel_does(kernels: Any, device: str) -> None:
    inputs = make_inputs(NAME, torch.bfloat16, "ordinary", "as trained", SIZES[3])
    rotated = on(device, INVENTORY.entry_point("rotary_embedding"))(**{k: inputs[k] for k in ("q", "k", "cos", "sin")})
    q_out, keys, values = on(device, kernels.rotary_cache_write)(**inputs)
    assert torch.equal(q_out, rotated[0])
    assert torch.equal(keys[:, :, inputs["positions"]], rotated[1])
    assert torch.equal(values[:, :, inputs["positions"]], inputs["v"])


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_projection_and_of_a_cache_are_taken_as_they_are(kernels: Any, device: str) -> None:
    qkv = torch.randn(2, 3, (8 + 2 * 2) * 32, device=device)
    q, k, v = (x.view(2, 3, -1, 32).transpose(1, 2) for x in qkv.split((8 * 32, 2 * 32, 2 * 32), dim=-1))
    angles = torch.randn(1, 3, 32, device=device)
    cache = torch.randn(2, 10, 2, 2, 32, device=device)
    keys, values = cache.permute(2, 0, 3, 1, 4)
    positions = torch.tensor([7, 0, 3], device=device)
    expected = kernels.rotary_cache_write(q, k, v, angles.cos(), angles.sin(), keys, values, positions)
    with recorded() as launches:
        kernels.rotary_cache_write_(*(x.to("meta") for x in (q, k, v, angles, angles, keys, values, positions)))
    assert len(launches) == 1
    q_out = kernels.rotary_cache_write_(q, k, v, angles.cos(), angles.sin(), keys, values, positions)
    assert all(map(torch.equal, (q_out, keys, values), expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 3])
def test_what_is_outside_of_the_cache_is_written_nowhere(kernels: Any, length: int, device: str) -> None:
    inputs = make_inputs(NAME, torch.float32, "ordinary", "as trained", {**SIZES[0], "S": length})
    inputs["positions"] = torch.arange(length) + inputs["keys"].shape[2] - length + 1
    room = inputs["positions"] < inputs["keys"].shape[2]
    _, keys, values = on(device, kernels.rotary_cache_write)(**inputs)
    inside = {k: v[:, :, room] if k in ("k", "v") else v for k, v in inputs.items()}
    assert torch.equal(values, inputs["values"].index_copy(2, inputs["positions"][room], inside["v"]))
    assert torch.equal(keys[:, :, :-length], inputs["keys"][:, :, :-length])


def launch_of(kernels: Any, dtype: torch.dtype, length: int, heads: int, key_heads: int, width: int) -> Launch:
    make = {"dtype": dtype, "device": "meta"}
    qkv = torch.empty(1, length, (heads + 2 * key_heads) * width, **make)
    q, k, v = qkv.split((heads * width, key_heads * width, key_heads * width), dim=-1)
    q, k, v = (x.view(1, length, -1, width).transpose(1, 2) for x in (q, k, v))
    angles, keys = torch.empty(1, length, width, **make), torch.empty(1, key_heads, 2112, width, **make)
    positions = torch.empty(length, dtype=torch.int64, device="meta")
    with recorded() as launches:
        kernels.rotary_cache_write_(q, k, v, angles, angles, keys, keys.clone(), positions)
    (launch,) = launches
    return launch


def test_a_decode_step_is_one_block_for_each_group_of_heads(kernels: Any) -> None:
    assert launch_of(kernels, torch.bfloat16, 1, 32, 8, 128).grid == (1, 4 + 1 + 1, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels: Any, arch: str) -> None:
    cases = ((torch.bfloat16, 1, 32, 8, 128), (torch.float16, 64, 8, 8, 80), (torch.float32, 1, 8, 4, 256))
    for case in cases:
        launch = launch_of(kernels, *case)
        assert compile_kernel(launch.kernel, launch.args, arch)
