"""Routed experts with many rows each, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf, nan
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("experts_clamped", "experts_silu", "experts_silu_fp32")
NARROW = (torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One token; experts without any; ragged tiles in every direction; several tiles for one expert, columns and steps.
SIZES = (
    {"N": 1, "K": 2, "E": 7, "H": 64, "I": 48}, {"N": 37, "K": 3, "E": 3, "H": 136, "I": 80},
    {"N": 150, "K": 1, "E": 2, "H": 40, "I": 72}, {"N": 300, "K": 2, "E": 3, "H": 264, "I": 152},
)  # fmt: skip
LAUNCHES = ["experts_count_kernel", "experts_place_kernel", "experts_rows_padded_kernel", "experts_product_kernel"]
ENDS = ["experts_product_kernel", "experts_combine_kernel"]


def module_of(name: str) -> ModuleType:
    return sys.modules[INVENTORY.entry_point(name).__module__]


PROMPT = sys.modules[module_of("experts_silu").Prompt.__module__]


@pytest.fixture
def of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes prompts of all calls."""
    for name in NAMES:
        monkeypatch.setattr(module_of(name), "has_many_rows", lambda *_: True)


def on(device: str, function: Callable[..., torch.Tensor], **inputs: Any) -> torch.Tensor:
    return function(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}).cpu()


def made(name: str, dtype: torch.dtype, sizes: dict[str, int], rows: str = "ordinary") -> dict[str, Any]:
    return make_inputs(name, dtype, rows, "as trained", sizes)


def names_of(launches: Any) -> list[str]:
    return [launch.kernel._pyfunc.__name__ for launch in launches]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_an_expert", ["short", "long"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, rows_an_expert, device, of_prompts, monkeypatch):
    tiling = PROMPT.pick_tiling(17 if rows_an_expert == "short" else 10_000, 1)
    monkeypatch.setattr(PROMPT, "pick_tiling", lambda *_: tiling)
    for sizes in SIZES:
        for rows in ("ordinary", "large"):
            inputs = made(name, dtype, sizes, rows)
            assert worst(lambda **given: on(device, INVENTORY.entry_point(name), **given), name, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_tanh_form_of_gelu(device, of_prompts, monkeypatch):
    kernels = module_of("experts_silu")
    inputs = made("experts_silu", torch.bfloat16, {"N": 60, "K": 2})
    results = [on(device, f, **inputs).float() for f in (kernels.experts_gelu_tanh, kernels.experts_silu)]
    monkeypatch.setattr(kernels, "has_many_rows", lambda *_: False)
    floats = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    right = on(device, kernels.experts_gelu_tanh, **floats)
    right_error, other_error = (float((result - right).norm() / right.norm()) for result in results)
    assert right_error < 0.01 < other_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("pairs", "count", "tile"), [(1, 1, 16), (9000, 5, 64), (400, 130, 16), (700, 3, 128)])
def test_every_pair_gets_a_row_of_its_expert(pairs, count, tile, device):
    index = torch.randint(0, count, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    index[index == 2] = 1  # an expert without pairs
    if pairs > 1:
        index[0], index[1], index[5] = -1, count, 2**40  # and pairs without an expert
    places = PROMPT.placed(index.to(device), count, tile)
    order, inverse, tiles = (x.cpu() for x in (places.order, places.inverse, places.tiles))
    experts = index.flatten()
    valid = (experts >= 0) & (experts < count)
    needed = -(-torch.bincount(experts[valid], minlength=count) // tile)
    used = int(needed.sum())
    assert tiles[0] == used
    assert tiles[1 : 1 + used].tolist() == torch.arange(count).repeat_interleave(needed).tolist()
    rows = order[: used * tile]
    assert rows[rows >= 0].sort().values.tolist() == valid.nonzero().flatten().tolist()
    assert (tiles[1 : 1 + used].repeat_interleave(tile)[rows >= 0] == experts[rows[rows >= 0]]).all()
    assert (rows.view(-1, tile).diff()[rows.view(-1, tile)[:, 1:] >= 0] > 0).all()  # in their order, the rest behind
    assert (order[inverse[valid]] == torch.arange(pairs)[valid]).all()
    assert (inverse[~valid] == len(order)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_experts_that_there_are_not_add_nothing(name, device, of_prompts):
    inputs = made(name, torch.bfloat16, {"N": 12, "K": 2, "E": 5})
    inputs["top_k_index"][0, 0], inputs["top_k_index"][1, 1] = 99, -3
    got = on(device, INVENTORY.entry_point(name), **inputs)
    weights = inputs["top_k_weights"].clone()
    weights[0, 0] = weights[1, 1] = 0
    inputs["top_k_weights"][0, 0], inputs["top_k_weights"][1, 1] = inf, nan
    strange = on(device, INVENTORY.entry_point(name), **inputs)
    torch.testing.assert_close(strange, got, rtol=0, atol=0)
    there = {**inputs, "top_k_index": inputs["top_k_index"].clamp(0, 4), "top_k_weights": weights}
    torch.testing.assert_close(got, on(device, INVENTORY.entry_point(name), **there), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_is_not_a_number_leaves_the_others_alone(name, device, of_prompts):
    inputs = made(name, torch.bfloat16, {"N": 40, "K": 2, "E": 3})
    clean = on(device, INVENTORY.entry_point(name), **inputs)
    inputs["hidden_states"][7] = float("nan")
    got = on(device, INVENTORY.entry_point(name), **inputs)
    assert got[7].isnan().all()
    others = torch.arange(40) != 7
    torch.testing.assert_close(got[others], clean[others], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_of_a_row_is_that_of_its_own_expert(device, of_prompts):
    """With matrices of zeros nothing else is left."""
    inputs = made("experts_clamped", torch.bfloat16, {"N": 9, "K": 2, "E": 3, "I": 8})
    inputs["down_proj"].zero_()
    got = on(device, INVENTORY.entry_point("experts_clamped"), **inputs)
    added = inputs["down_proj_bias"].float()[inputs["top_k_index"]] * inputs["top_k_weights"].float()[..., None]
    torch.testing.assert_close(got.float(), added.sum(1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_alone_come_here_and_never_in_float32(name):
    for tokens, dtype in ((33, torch.bfloat16), (33, torch.float16), (32, torch.bfloat16), (33, torch.float32)):
        inputs = made(name, dtype, {"N": tokens, "K": 2, "E": 4, "I": 64})
        moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        with recorded() as launches:
            INVENTORY.entry_point(name)(**moved)
        is_prompt = tokens == 33 and dtype != torch.float32
        assert (names_of(launches) == [*LAUNCHES, *ENDS]) == is_prompt
        assert (names_of(launches)[0] == "experts_sort_kernel") != is_prompt


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_can_be_captured_in_a_cuda_graph_that_follows_other_choices(name, device):
    inputs = made(name, torch.bfloat16, {"N": 100, "K": 2, "E": 4, "I": 64})
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    function = INVENTORY.entry_point(name)
    first = function(**moved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**moved)
    for index in (moved["top_k_index"].clone(), moved["top_k_index"].flip(0), torch.zeros_like(moved["top_k_index"])):
        moved["top_k_index"].copy_(index)
        expected = function(**moved)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not torch.equal(expected, first)


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch, tokens, monkeypatch):
    """Short tiles and long, matrices stored either way, gates whose columns lie apart or take turns."""
    monkeypatch.setattr(PROMPT, "has_bulk_copies", lambda device: arch != "sm_80")
    x, index = (
        torch.empty(tokens, size, dtype=dtype, device="meta")
        for size, dtype in ((2880, torch.bfloat16), (4, torch.long))
    )
    up, down = (torch.empty(32, *s, dtype=x.dtype, device="meta") for s in ((2880, 5760), (2880, 2880)))
    biases = [torch.empty(32, m.shape[2], dtype=x.dtype, device="meta") for m in (up, down)]
    weights = torch.empty_like(index, dtype=x.dtype)
    with recorded() as launches:
        INVENTORY.entry_point("experts_clamped")(x, index, weights, up, biases[0], down, biases[1], 1.702, 7.0)
        INVENTORY.entry_point("experts_silu")(x, index, weights, up.mT.contiguous(), down)
    assert names_of(launches) == 2 * [*LAUNCHES, *ENDS]
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)
