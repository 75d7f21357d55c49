"""The benchmark of latent attention, without a GPU: its dry run, and a measurement on stand-ins."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_stand_ins import without_gpu
from repository import ROOT

SMALL = ("--only", "deepseek-v2-lite", "--batches", "8", "--contexts", "512")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_latent_attention")


def test_a_dry_run_has_the_author_s_order_beside_every_tiling(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    assert bench.main([*SMALL, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [line[27:51].strip() for line in lines]
    assert labels == ["torch", "author", "rule", *(f"{shares} blocks of 16 heads" for shares in (2, 4, 8))]
    (author,) = (line for line in lines if " author " in line)
    assert author.count("concat_kernel") == 2
    assert "latent" not in author.split("error")[1]
    (rule,) = (line for line in lines if " rule " in line)
    assert "latent_decode_kernel (8, 9), latent_combine_kernel (16, 4, 8)" in rule


def test_tilings_fill_the_gpu_neither_too_little_nor_too_often(bench: Any) -> None:
    (case,) = bench.cases(["deepseek-v3"], [8], [2048])
    found = bench.tilings(case, 132)
    assert found.pop("rule").shares == 0  # as many as the rule says
    assert list(found) == [f"{tiling.shares} blocks of {tiling.rows} heads" for tiling in found.values()]
    assert {tiling.rows for tiling in found.values()} == {16, 32, 64}
    for tiling in found.values():
        assert 16 <= tiling.shares * 8 * 128 // tiling.rows <= 4 * 132


def test_few_heads_are_in_one_block(bench: Any) -> None:
    (case,) = bench.cases(["deepseek-v2-lite"], [1], [2048])
    assert list(bench.tilings(case, 132)) == ["rule", "16 blocks of 16 heads", "32 blocks of 16 heads"]


@pytest.fixture
def small(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A case, and the benchmark as it goes on a GPU, on stand-ins for what only a GPU has."""
    case = bench.Case("small", 4, 1, 100)
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    return without_gpu(bench, case, monkeypatch)


def test_what_is_measured_names_the_best(
    bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter((90.0, 40.0, 8.0))
    monkeypatch.setattr(bench, "median_time", lambda calls: SimpleNamespace(microseconds=next(times)))
    assert bench.measure(small)["microseconds"] == {"torch": 90.0, "author": 40.0, "rule": 8.0}
    assert "best 8.0 us (rule), rule 8.0 us, author 40.0 us" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.absorbed
    monkeypatch.setattr(bench, "absorbed", lambda tiling, *values: right(tiling, *values) * 1.1)
    with pytest.raises(SystemExit, match=r"small 1x100, rule: relative error 1.0.e-01"):
        bench.measure(small)


def test_replays_of_ours_that_differ_are_not_timed(bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "replays_that_differ", lambda run, arguments: 3)
    with pytest.raises(SystemExit, match="author: 3 replays differ"):
        bench.measure(small)


def test_the_reference_sees_what_is_filled_alone(bench: Any, small: Any) -> None:
    arguments = small.make("cpu")
    expected = bench.exact(small, *arguments)
    for cached in arguments[2:4]:
        cached[:, :, small.filled :] = torch.nan
    assert torch.equal(bench.exact(small, *arguments), expected)
