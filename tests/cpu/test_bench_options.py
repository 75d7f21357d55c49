"""What the command line of bench refuses, and what it says of a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from tilegym_fx.bench import __main__ as command
from tilegym_fx.bench.cases import parse_cases
from tilegym_fx.errors import UsageError

RESULTS = str(ROOT / "benchmarks" / "2026-12-01_h200_second" / "gemma_3_4b_12_layers.jsonl")


@pytest.mark.parametrize(
    ("word", "reason"),
    [("prefill", "prefill is a phase without its sizes"), ("decode:0@5", "decode:0@5 is a phase of size 0"),
     ("decod:1@5", "decod:1@5 is no phase"), ("prefill:2x", "prefill:2x is no phase"), ("walk", "walk is no phase")],
)  # fmt: skip
def test_a_phase_is_refused_for_what_is_wrong_with_it(word: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"^{reason}"):
        parse_cases([word])


@pytest.mark.parametrize(
    ("given", "named"), [(["llama"], "MODEL"), (["--layers", "3"], "--layers"), (["--dry-run"], "--dry-run"),
                         (["llama", "--variants", "eager"], "MODEL, --variants")],
)  # fmt: skip
def test_options_of_a_run_are_refused_where_results_are_read(
    given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*given, "--from", RESULTS]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"so that {named} would do nothing" in line


def test_what_becomes_of_results_may_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--from", RESULTS, "--svg", str(tmp_path / "picture.svg")]) == 0
    assert "gemma" in capsys.readouterr().out
    assert (tmp_path / "picture.svg").exists()


@pytest.mark.parametrize(("phase", "cut"), [("prefill:4x200", "prefill:2x12"), ("decode:2@12", "")])
def test_a_dry_run_says_what_it_cuts(
    phase: str, cut: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*_: Any) -> None:
        raise UsageError("stop here")

    monkeypatch.setattr(command, "run", nothing)
    assert command.main(["llama", "--dry-run", "--phases", phase]) == 1
    said = capsys.readouterr().err
    assert (f"phases are cut to {cut}" in said) if cut else ("cut" not in said)
