"""The benchmark of a cold start: what it counts, and that both starts share nothing but the caches."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("cold_start")


@pytest.mark.filterwarnings("ignore:tilegym_fx")
def test_a_start_counts_every_step(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one applies what the first one has written."""
    for kind in bench.STARTS:
        assert bench.main([MODEL, "--dry-run", "--inside", kind, "--file", str(tmp_path / "modeling.py")]) == 0
        seconds = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert set(seconds) == set(bench.STEPS)
    assert "PATCHES" in (tmp_path / "modeling.py").read_text()
    assert seconds["kernelize"] < 1


def test_the_warm_start_has_the_caches_that_the_cold_one_filled(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        starts.append((command, {name: env[name] for name in bench.CACHES}))
        seconds = dict.fromkeys(bench.STEPS, float(len(starts)))
        return subprocess.CompletedProcess(command, 0, json.dumps(seconds), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert bench.main([MODEL, "--dry-run", "--json", str(tmp_path / "found.json")]) == 0
    assert [command[command.index("--inside") + 1] for command, _ in starts] == ["cold", "warm", "emitted"]
    assert starts[0][1] == starts[1][1] == starts[2][1]
    assert len({command[command.index("--file") + 1] for command, _ in starts}) == 1
    assert len(set(starts[0][1].values())) == len(bench.CACHES)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["cold"]["first"], found["warm"]["first"]) == (1.0, 2.0)
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]] == ["3.0", "6.0", "9.0"]


def test_a_start_that_fails_has_said_why_itself(bench: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^error: a start failed, see above$"):
        bench.start("cold", ["no/such-model", "--dry-run"], tmp_path)
    assert "no/such-model" in capfd.readouterr().err


def test_a_start_that_takes_too_long_says_where_it_is(
    bench: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.start("cold", [MODEL, "--dry-run", "--limit", "0.1"], tmp_path)
    assert "cold_start.py" in capfd.readouterr().err
