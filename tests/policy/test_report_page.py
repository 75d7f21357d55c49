"""Every kind of line that a report can have is explained in docs/reading_a_report.md."""

from __future__ import annotations

import re

import pytest
from repository import ROOT
from torch import nn

from tilegym_fx.apply import GivenBack
from tilegym_fx.live_report import Estimate, Report
from tilegym_fx.pipeline import Outcome
from tilegym_fx.results import Match, Plan, PlannedMatch, Rejection, Written
from tilegym_fx.verify import Check

PAGE = (ROOT / "docs" / "reading_a_report.md").read_text(encoding="utf-8")
MATCHES = [Match("rms_norm", "reference", "exact", {}, (), ()) for _ in range(2)]
REJECTIONS = tuple(Rejection("linear", "reference", lambda n=n: f"reason {'x' * n}", (), n) for n in range(12))
#: Everything that can happen to a model has happened to this one.
REPORT = Report(
    nn.Linear.__name__,
    "",
    tuple(Written(m, f"layers.{i}", "Norm", "forward", "f.py", 1, 0) for i, m in enumerate(MATCHES)),
    REJECTIONS,
    {"prefill": Estimate((), 1.0)},
    {"decode": "it takes no cache"},
    (Check("prefill", 0.1, 0.2, 0.1), Check("decode 1", 0.1, 0.2, None), Check("decode 2", 1.0, 0.2, None, False)),
    "it takes float32 alone",
    given_back=tuple(GivenBack(f"mlp.{i}", "Linear", "has a hook") for i in range(9)),
    graph_form={"prefill": Estimate((), 1.0)},
    device="h200",
    runs="kernels",
    judged_by_places="prefill: off by 0.8, 0.2 allowed, and it chooses by scores; 12 calls of 2 ops are right",
    whole="layers.0 and layers.1, which are alike, are written in different ways",
    kept=True,
    not_kept="mlp has hooks",
)
OUTCOME = Outcome(
    Plan(tuple(PlannedMatch(m, None, 1.0, 1.0) for m in MATCHES), REJECTIONS), 9, device="h200", runs="kernels"
)
LINES = [line.strip() for report in (REPORT, OUTCOME) for line in str(report).splitlines()]


def explained() -> list[re.Pattern[str]]:
    """The first column of the tables about reports: three dots are anything, a number is any."""
    section = PAGE.partition("## What `print(tilegym_fx.report(model))` says")[2].partition("\n## ")[0]
    shapes = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    return [re.compile(re.sub(r"\\ (\\ )*", r"\\s+", re.sub(r"\d+", r"\\d+", re.escape(s))).replace(r"\.\.\.", ".+"))
            for s in shapes]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_report_is_explained(line: str) -> None:
    assert any(shape.match(line) for shape in explained()), line


def test_nothing_is_explained_that_no_report_says() -> None:
    assert [shape.pattern for shape in explained() if not any(map(shape.match, LINES))] == []


def test_another_line_is_not_explained() -> None:
    assert not any(shape.match("it took 3 s") for shape in explained())
