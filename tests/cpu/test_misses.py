"""What reports say of places that were not taken: equal reasons once, with a count and the first place."""

from __future__ import annotations

import pytest

from tilegym_fx.errors import UsageError
from tilegym_fx.live_report import Report
from tilegym_fx.pipeline import Outcome
from tilegym_fx.results import Frame, Plan, Rejection, Site, misses

FILE = "/somebody/env/lib/python3.11/site-packages/pkg/models/model.py"


def miss(layer: int, reason: str, definition: str = "norm", depth: int = 1) -> Rejection:
    site = Site(f"model.layers.{layer}.norm", "Norm", (Frame(FILE, 7, "Norm.forward"),))
    return Rejection(definition, "reference", lambda: reason, (), depth, site)


def test_equal_reasons_are_told_once_with_their_first_place() -> None:
    assert misses(miss(layer, "it is late") for layer in (0, 1, 1, 2)) == [
        "norm at model.layers.0.norm (Norm) pkg/models/model.py:7 and 2 more places: it is late"
    ]


def test_those_without_a_line_of_source_come_last_however_near_they_are() -> None:
    nowhere = Rejection("norm", "reference", lambda: "it is early", (), 9, Site())
    assert misses([nowhere, miss(0, "it is late")]) == [
        "norm at model.layers.0.norm (Norm) pkg/models/model.py:7: it is late", "norm at no source line: it is early",
    ]  # fmt: skip


def test_the_numbers_of_nodes_and_layers_make_no_difference() -> None:
    found = misses(miss(n, f"mul_{n} is read by model.layers.{n}.mlp" if n else "mul is read by model.layers.0.mlp")
                   for n in (0, 1))  # fmt: skip
    assert found == ["norm at model.layers.0.norm (Norm) pkg/models/model.py:7 and 1 more place: "
                     "mul is read by model.layers.0.mlp"]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        miss(1, "argument 2 of mul_1 is 0.5, not 0.25"),
        miss(1, "argument 1 of mul_1 is 0.75, not 0.25"),
        miss(1, "argument 1 of mul_1 is 1e-06, not 0.25"),
        miss(1, "argument 1 of add_1 is 0.5, not 0.25"),
        miss(1, "argument 1 of mul_1 is 0.5, not 0.25", definition="other"),
    ],
)
def test_what_differs_in_more_than_that_is_told_apart(other: Rejection) -> None:
    assert len(misses([miss(0, "argument 1 of mul is 0.5, not 0.25"), other])) == 2


def test_the_nearest_is_first_and_what_overlaps_is_none() -> None:
    found = misses([miss(0, "far", depth=1), miss(0, "near", depth=9), miss(0, "overlaps another", depth=99)])
    assert [line.rsplit(": ")[-1] for line in found] == ["near", "far"]


def test_reports_are_short_and_name_no_folder_of_the_machine() -> None:
    rejections = tuple(miss(layer, f"reason {kind}") for kind in range(20) for layer in range(50))
    for report in (Outcome(Plan((), rejections), 9), Report("Model", "", (), rejections, {}, {})):
        text = str(report)
        assert "  not: norm at model.layers.0.norm (Norm) pkg/models/model.py:7 and 49 more places: reason 0" in text
        assert "  and 12 more in .misses()" in text
        assert "somebody" not in text
        assert "lambda" not in text
        assert len(text.splitlines()) < 15
        assert len(report.misses()) == 20
    assert len(repr(Outcome(Plan((), rejections), 9))) < 200


@pytest.mark.parametrize("coverage", [80, 1.01, -0.1])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(UsageError, match="from 0 to 1"):
        Report("Model", "", (), [], {}, {}).require(coverage=coverage)
