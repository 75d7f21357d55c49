"""The benchmark of decode attention, without a GPU: its dry run, and a measurement on stand-ins."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_stand_ins import without_gpu
from repository import ROOT

SMALL = ("--only", "llama-8b", "qwen3-8b", "gemma-3-4b", "--batches", "1", "--contexts", "512")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_decode_attention")


def test_a_dry_run_goes_through_every_tiling(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({line[:59] for line in lines}) == len(lines)
    assert sum("attention_combine_kernel" in line for line in lines) > 5
    (line,) = (line for line in lines if "llama-8b" in line and "8 blocks of 64" in line)
    assert line.endswith("attention_decode_kernel (8, 8), attention_combine_kernel (4, 8)")


def test_models_with_equal_heads_are_measured_once(bench: Any) -> None:
    found = list(bench.cases(["llama-8b", "gemma-3-4b", "qwen3-8b"], [1], [2048, 8192]))
    assert [str(case) for case in found] == [
        "llama-8b qwen3-8b 1x2048", "llama-8b qwen3-8b 1x8192", "gemma-3-4b 1x2048", "gemma-3-4b 1x8192",
    ]  # fmt: skip


def test_a_name_tells_the_blocks_and_the_keys_of_a_step(bench: Any) -> None:
    (case,) = bench.cases(["llama-8b"], [8], [2048])
    found = bench.tilings(case, 132)
    assert found.pop("rule").shares == 0  # as many as the rule says
    assert list(found) == [f"{tiling.shares} blocks of {tiling.keys}" for tiling in found.values()]
    assert {tiling.keys for tiling in found.values()} == {64, 128, 256}
    assert {tiling.shares for tiling in found.values()} == {4, 8, 16}  # 8 * 132 blocks at most


@pytest.fixture
def small(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A case, and the benchmark as it goes on a GPU, on stand-ins for what only a GPU has."""
    case = bench.Case("small", (4, 2, 64), 1, 1000)
    return without_gpu(bench, case, monkeypatch)


def test_what_is_measured_names_the_best(
    bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter((9.0, 8.0, 7.5, 8.5))
    monkeypatch.setattr(bench, "median_time", lambda calls: SimpleNamespace(microseconds=next(times)))
    row = bench.measure(small)
    assert row["microseconds"] == {
        "rule": 9.0, "4 blocks of 128": 8.0, "8 blocks of 128": 7.5, "4 blocks of 256": 8.5,
    }  # fmt: skip
    assert "best 7.5 us (8 blocks of 128), rule 9.0 us" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.attend
    monkeypatch.setattr(bench, "attend", lambda tiling, *values: right(tiling, *values) * (1.1 if tiling.shares else 1))
    with pytest.raises(SystemExit, match=r"4 blocks of 128: relative error 1.0.e-01"):
        bench.measure(small)


def test_replays_that_differ_are_not_timed(bench: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "replays_that_differ", lambda run, arguments: 3)
    with pytest.raises(SystemExit, match=r"3 of 50 replays differ"):
        bench.measure(small)


def test_the_reference_sees_what_is_filled_alone(bench: Any, small: Any) -> None:
    q, k, v, mask = small.make("cpu")
    expected = bench.exact(small, q, k, v, mask)
    k[:, :, small.filled :] = torch.nan
    assert torch.equal(bench.exact(small, q, k, v, mask), expected)
