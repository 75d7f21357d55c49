"""Decode attention in one launch: the block of a key head that is done last adds up what all have found."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from attentions import BRAIN, DEVICES, DTYPES, FULL, HALF, check, launches_of, masks, operands

from tilegym_fx import inventory
from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.counters import counters_for
from tilegym_fx.interpreter import runner
from tilegym_fx.launch import recorded

#: B, Hq, Hk, S, T, D: groups that are no power of two, several queries, widths with padding.
SHAPES = (
    (2, 6, 2, 1, 150, 64), (1, 7, 1, 3, 300, 128), (2, 2, 2, 1, 400, 80), (1, 12, 1, 1, 90, 64), (1, 4, 2, 8, 260, 64),
    (1, 4, 2, 2, 100, 256),
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[inventory.load().entry_point("gqa_attention").__module__]


@pytest.fixture(params=[2, 5, 33])
def once(request: pytest.FixtureRequest, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """The rule says: in one launch, with so many shares."""
    rule, shares = kernels.choose_decode_tiling, request.param
    monkeypatch.setattr(
        kernels, "choose_decode_tiling", lambda *sizes: replace(rule(*sizes), keys=16, shares=shares, once=True)
    )
    return int(shares)


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run in an order that nobody knows."""

    class Shuffled:
        @staticmethod
        def product(*counts: Any) -> list[Any]:
            blocks = list(itertools.product(*counts))
            random.shuffle(blocks)
            return blocks

    monkeypatch.setattr(runner, "itertools", Shuffled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("once")
def test_equals_the_definition(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if not kernels.is_decode(shape[3], shape[1] // shape[2], dtype.itemsize, None, False):
        pytest.skip("these are so many rows that prefill takes them")
    q, k, v = operands(*shape, dtype)
    check(kernels, "gqa_attention", q, k, v, 0.7 * shape[-1] ** -0.5, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 6, 2, 1, 600, 80), (2, 4, 2, 3, 700, 64)], ids=str)
@pytest.mark.usefixtures("once")
def test_masks_mean_what_they_mean_in_two_launches(kernels: Any, shape: tuple[int, ...], device: str) -> None:
    batch, heads, _, length, keys, width = shape
    q, k, v = operands(*shape, BRAIN)
    for mask in masks(batch, heads, length, keys).values():
        check(kernels, "gqa_attention_masked", q, k, v, mask, width**-0.5, device=device)
        added = torch.zeros(mask.shape, dtype=BRAIN).masked_fill(~mask, -torch.inf)
        check(kernels, "gqa_attention_masked", q, k, v, added, width**-0.5, device=device)


@pytest.mark.usefixtures("once", "any_order")
def test_whichever_block_is_last_the_result_has_the_same_bits(kernels: Any) -> None:
    q, k, v = operands(2, 6, 2, 1, 300, 64, BRAIN)
    results = [kernels.gqa_attention(q, k, v, 0.125) for _ in range(4)]
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_each_launch_leaves_its_counters_at_zero(kernels: Any) -> None:
    q, k, v = operands(2, 6, 2, 1, 300, 64, FULL)
    counters = counters_for(CPU, 4)
    assert counters is not None
    results = torch.full((3, 2, 1, 6, 64), torch.nan)
    for y, start in zip(results, (0, 0, -1), strict=True):
        assert counters.tolist() == [0] * 4
        counters += start
        kernels.run_decode(q, k, v, None, y, 0.125, kernels.Tiling(0, 16, 3, shares=8, once=True))
    counters.zero_()
    assert torch.equal(results[0], results[1])
    assert not results[0].isnan().any()
    assert results[2].isnan().all()  # no block was the last


def names_of(kernels: Any) -> list[str]:
    q = torch.empty(1, 32, 1, 128, dtype=BRAIN, device="meta")
    k = torch.empty(1, 8, 2048, 128, dtype=BRAIN, device="meta")
    with recorded() as launches:
        kernels.gqa_attention(q, k, k, 0.1)
    return [launch.kernel._pyfunc.__name__ for launch in launches]


TWO_LAUNCHES = ["attention_decode_kernel", "attention_combine_kernel"]


def test_it_is_taken_only_where_it_is_asked_for(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of(kernels) == TWO_LAUNCHES
    rule = kernels.choose_decode_tiling
    monkeypatch.setattr(kernels, "choose_decode_tiling", lambda *sizes: replace(rule(*sizes), once=True))
    assert names_of(kernels) == ["attention_decode_once_kernel"]
    monkeypatch.setattr(kernels, "counters_for", lambda device, count: None)
    assert names_of(kernels) == TWO_LAUNCHES


def test_the_tuner_may_choose_it(kernels: Any) -> None:
    assert {config["once"] for config in kernels.CANDIDATES["attention_decode"]} == {False, True}


def test_a_head_alone_needs_no_sum(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = kernels.Tiling(0, 64, 3, shares=1, once=True)
    monkeypatch.setattr(kernels, "choose_decode_tiling", lambda *sizes: tiling)
    assert names_of(kernels) == TWO_LAUNCHES[:1]


#: dtype, Hq, Hk, S, T, D, mask.
COMPILED = (
    (BRAIN, 32, 8, 1, 4096, 128, (1, torch.bool)), (BRAIN, 8, 4, 1, 4096, 256, None),
    (BRAIN, 28, 4, 1, 2048, 128, None), (HALF, 32, 8, 1, 512, 64, (1, HALF)),
    (FULL, 32, 8, 1, 4096, 64, (1, torch.bool)),
)  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels: Any, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    rule = kernels.choose_decode_tiling
    monkeypatch.setattr(kernels, "choose_decode_tiling", lambda *sizes: replace(rule(*sizes), once=True))
    for case in COMPILED:
        (launch,) = launches_of(kernels, *case)
        assert compile_kernel(launch.kernel, launch.args, arch)


@pytest.mark.gpu
@pytest.mark.usefixtures("once")
def test_graphs_on_two_streams_do_not_count_each_other(kernels: Any) -> None:
    """Replayed side by side, many times, each gives what its first replay gave."""
    sides = []
    for seed in range(2):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, h, n, 128, dtype=BRAIN, device="cuda") for h, n in ((32, 1), (8, 2048), (8, 2048)))
        expected, graph = kernels.gqa_attention(q, k, v, 0.1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                result = kernels.gqa_attention(q, k, v, 0.1)
        sides.append((torch.cuda.Stream(), graph, result, expected))
    for _ in range(50):
        for stream, graph, *_ in sides:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, result, expected in sides:
        assert torch.equal(result, expected)
