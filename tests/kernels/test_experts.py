"""The routed experts' kernels against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from dataclasses import astuple
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("experts_clamped", "experts_silu", "experts_silu_fp32")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One token, experts without tokens and with several tiles of rows, ragged tiles in every direction.
SIZES = (
    {"N": 1, "K": 2, "E": 7, "H": 64, "I": 48}, {"N": 37, "K": 3, "E": 3, "H": 136, "I": 80},
    {"N": 150, "K": 1, "E": 2, "H": 40, "I": 72},
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("experts_silu").__module__]


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> torch.Tensor:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(name)(**moved).cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_number_of_tokens(name, dtype, device, monkeypatch):
    monkeypatch.setattr(sys.modules[INVENTORY.entry_point(name).__module__], "has_many_rows", lambda *_: False)
    for sizes in SIZES:
        for rows in ROWS if sizes["N"] == 37 else ("ordinary",):
            assert worst(on(device, name), name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_sort_keeps_the_order_of_an_experts_pairs(device):
    sort = sys.modules[INVENTORY.entry_point("experts_rows").__module__].sort_pairs
    index = torch.randint(0, 6, (3000,), generator=torch.Generator().manual_seed(1))
    index[index == 4] = 5
    order, ends = (torch.full((n,), -7, dtype=torch.int32, device=device) for n in (3000, 6))
    sort(index.to(device), order, ends)
    expected = torch.sort(index, stable=True)
    assert torch.equal(order.cpu().long(), expected.indices)
    assert torch.equal(ends.cpu().long(), torch.bincount(index, minlength=6).cumsum(0))


def test_all_tokens_may_choose_one_expert():
    inputs = make_inputs("experts_silu", torch.float32, "ordinary", "as trained", {"N": 40, "K": 1})
    inputs["top_k_index"].fill_(3)
    assert worst(INVENTORY.entry_point("experts_silu"), "experts_silu", inputs, torch.float32) <= 1


def test_the_result_of_a_token_does_not_depend_on_the_others():
    inputs = make_inputs("experts_silu", torch.bfloat16, "ordinary", "as trained", {"N": 20})
    whole = INVENTORY.entry_point("experts_silu")(**inputs)
    part = {**inputs, **{k: inputs[k][7:] for k in ("hidden_states", "top_k_index", "top_k_weights")}}
    assert torch.equal(INVENTORY.entry_point("experts_silu")(**part), whole[7:])


def test_there_are_blocks_for_the_worst_distribution(kernels):
    """However the pairs are spread, each expert's last tile of rows has a block."""
    for pairs, count, rows in ((8, 128, 16), (500, 7, 64), (4096, 8, 128), (129, 2, 128)):
        blocks = min(pairs, pairs // rows + min(pairs, count))
        spread = [1] * min(pairs, count)
        spread[0] += pairs - sum(spread)
        assert sum(-(-size // rows) for size in spread) <= blocks


def test_no_tokens_launch_nothing():
    inputs = make_inputs("experts_silu", torch.float32, "ordinary", "as trained", {"N": 0})
    with recorded() as launches:
        assert INVENTORY.entry_point("experts_silu")(**inputs).shape == (0, 72)
    assert launches == []


def test_a_prompt_may_have_more_tokens_than_a_grid_has_rows():
    x = torch.empty(70_000, 64, device="meta")
    index = torch.empty(70_000, 2, dtype=torch.int64, device="meta")
    with recorded() as launches:
        packed, down = torch.empty(8, 64, 64, device="meta"), torch.empty(8, 64, 32, device="meta")
        INVENTORY.entry_point("experts_silu")(x, index, torch.empty(70_000, 2, device="meta"), packed, down)
        rows, order, _ = INVENTORY.entry_point("experts_rows")(x, index, 8)
        INVENTORY.entry_point("experts_combine")(rows, torch.empty(70_000, 2, device="meta"), order)
    assert all(size <= 65535 for made in launches for size in made.grid[1:])


def test_the_tilings_that_were_measured_to_be_the_fastest(kernels):
    few, more, many = ((16, 64, 256, 2), (16, 64, 128, 3), (64, 128, 64, 2))
    for pairs, tiling in ((4, few), (16, few), (17, more), (16 * 128, more), (16 * 128 + 1, many), (16384, many)):
        assert astuple(kernels.pick_tiling(pairs, 128, 2)) == tiling
    assert astuple(kernels.pick_tiling(40, 2, 2)) == many
    assert [astuple(kernels.pick_tiling(n, 8, 4)) for n in (128, 129)] == [(16, 32, 32, 2), (64, 32, 16, 2)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    tokens, dtype = (64, 128, 1)[place % 3], DTYPES[place % 3]
    x = torch.empty(tokens, 2048, dtype=dtype, device="meta")
    index = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    packed, down = (torch.empty(128, *s, dtype=dtype, device="meta") for s in ((1536, 2048), (2048, 768)))
    with recorded() as launches:
        INVENTORY.entry_point("experts_silu")(x, index, torch.empty_like(index, dtype=dtype), packed, down)
    assert len(launches) == 4
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_clamped_gate_compiles_for_every_architecture(arch):
    x = torch.empty(1, 2880, dtype=torch.bfloat16, device="meta")
    index = torch.empty(1, 4, dtype=torch.int64, device="meta")
    up, down = (torch.empty(32, *s, dtype=x.dtype, device="meta") for s in ((2880, 5760), (2880, 2880)))
    biases = [torch.empty(32, m.shape[2], dtype=x.dtype, device="meta") for m in (up, down)]
    with recorded() as launches:
        weights = torch.empty_like(index, dtype=x.dtype)
        INVENTORY.entry_point("experts_clamped")(x, index, weights, up, biases[0], down, biases[1], 1.702, 7.0)
    assert len(launches) == 4
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)
