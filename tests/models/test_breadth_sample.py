"""A sample of `scan --all`: matched places and written kernels are no fewer than they were, and nothing is wrong.

The counts are in `coverage-pinned.json`, made by `nox -s "drift(pinned)" -- --update`. A type that does better than
its counts passes; write the file afresh to hold the gain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from breadth_sample import FEW, SAMPLE

from tilegym_fx.breadth.judge import judge
from tilegym_fx.breadth.record import Row
from tilegym_fx.breadth.run import dropped
from tilegym_fx.inventory import load

COUNTS = Path(__file__).parent / "coverage-pinned.json"


def counts() -> dict[str, dict[str, Any]]:
    """Model type -> its row in the committed file."""
    return {row["model_type"]: row for row in json.loads(COUNTS.read_text(encoding="utf-8"))["rows"]}


def test_the_committed_counts_are_those_of_the_sample() -> None:
    assert sorted(counts()) == sorted(SAMPLE)


@pytest.mark.parametrize("name", FEW)
def test_no_count_has_dropped(name: str, tmp_path: Path) -> None:
    floor = tmp_path / "floor.json"
    floor.write_text(json.dumps({"rows": [counts()[name]]}))
    row = judge(name, load())
    assert row.is_right, row.problem
    assert row.difference == 0.0
    assert dropped([row], floor) == []


@pytest.mark.parametrize("name", SAMPLE)
def test_the_committed_row_is_a_good_one(name: str) -> None:
    row = Row.of_line(json.dumps(counts()[name]))
    assert row.is_exported
    assert row.is_right, row.problem
