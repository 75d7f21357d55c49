"""The rows of a survey: which near miss is told, how uncovered time is grouped, what a failing phase costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from pass_checks import INVENTORY

from tilegym_fx import __version__
from tilegym_fx import survey as module
from tilegym_fx.cost import get_device
from tilegym_fx.errors import ExportError
from tilegym_fx.plan import Policy
from tilegym_fx.results import Frame, Rejection, Site
from tilegym_fx.survey import MissRow, Survey, _miss_rows, as_json, op_name, short, survey, versions

POLICY = Policy(get_device("h200"), ("rms_norm", "silu_mul", "linear"))


def miss(definition: str, owner: str, reason: str, depth: int, layer: int = 0) -> Rejection:
    site = Site(f"model.layers.{layer}", owner, (Frame("/x/site-packages/pkg/model.py", 7, "forward"),))
    return Rejection(definition, "reference", lambda: reason, (), depth, site)


def surveyed(tmp_path: Path, **options: Any) -> Survey:
    return survey(tiny_folder.write(tmp_path), INVENTORY, POLICY, seq=16, **options)


class TestNearMisses:
    def test_the_deepest_of_each_definition_and_class_is_told(self) -> None:
        rows = _miss_rows([miss("norm", "A", "far", 2), miss("norm", "A", "near", 5, 1), miss("norm", "B", "other", 1)])
        assert rows == [
            MissRow("norm", "model.layers.0 (B) pkg/model.py:7", "other"),
            MissRow("norm", "model.layers.1 (A) pkg/model.py:7", "near"),
        ]

    def test_what_another_match_overlaps_is_no_miss(self) -> None:
        assert _miss_rows([miss("norm", "A", "overlaps add_norm, which saves more", 9)]) == []

    def test_a_reason_is_worded_once_for_each_row(self) -> None:
        worded = []

        def why() -> str:
            worded.append(1)
            return "reason"

        rejections = [Rejection("norm", "reference", why, (), 3, Site("m", "A")) for _ in range(50)]
        assert len(_miss_rows(rejections)) == 1
        assert len(worded) <= 2


class TestSites:
    def test_a_file_is_named_from_its_package_on(self) -> None:
        site = Site("model.norm", "Norm", (Frame("/venv/lib/site-packages/pkg/a/b.py", 3, "forward"),))
        assert short(site) == "model.norm (Norm) pkg/a/b.py:3"
        assert short(site, path=False) == "Norm pkg/a/b.py:3"

    def test_a_node_without_a_record_says_so(self) -> None:
        assert short(Site()) == str(Site()) == "no source line"
        assert short(Site("model.norm", "Norm")) == "model.norm (Norm) no source line"

    def test_an_operation_is_named_without_its_overload(self) -> None:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        assert op_name(graph.call_function(torch.ops.aten.mul.Tensor, (x, x))) == "aten.mul"


class TestSurvey:
    def test_equal_operations_at_one_line_are_one_row(self, tmp_path: Path) -> None:
        (phase,) = surveyed(tmp_path, phases=("prefill",)).phases
        rows = {(row.op, row.where): row.count for row in phase.uncovered}
        assert len(rows) == len(phase.uncovered)
        attention = [count for (op, where), count in rows.items() if op == "aten.scaled_dot_product_attention"]
        assert attention == [2]  # of two layers
        shares = [row.time_share for row in phase.uncovered]
        assert shares == sorted(shares, reverse=True)

    def test_a_phase_that_fails_says_why_and_the_other_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = module.export_phase

        def failing(model: Any, phase: Any, *sizes: int) -> Any:
            if phase == "decode":
                raise ExportError("no cache", advice="Scan its prefill phase alone")
            return original(model, phase, *sizes)

        monkeypatch.setattr(module, "export_phase", failing)
        found = surveyed(tmp_path)
        assert [phase.error for phase in found.phases] == [None, "no cache. Scan its prefill phase alone."]
        assert found.sites > 0
        assert as_json(found)["phases"][1] == {"phase": "decode", "error": "no cache. Scan its prefill phase alone."}

    def test_all_phases_failing_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*args: Any) -> Any:
            raise ExportError("it cannot be traced")

        monkeypatch.setattr(module, "export_phase", failing)
        with pytest.raises(ExportError, match=r"no phase of .* can be captured: it cannot be traced"):
            surveyed(tmp_path)

    def test_progress_names_each_step(self, tmp_path: Path) -> None:
        steps: list[str] = []
        surveyed(tmp_path, progress=steps.append)
        assert [s for s in steps if s.startswith("exporting")] == ["exporting prefill", "exporting decode"]
        assert steps[0].startswith("reading the configuration of ")

    def test_forms_do_not_change_the_coverage(self, tmp_path: Path) -> None:
        plain, formed = (surveyed(tmp_path, phases=("prefill",), forms=forms).phases[0] for forms in (False, True))
        assert formed.coverage == pytest.approx(plain.coverage)
        assert [r.form for r in plain.definitions] == [None] * len(plain.definitions)
        assert {r.form for r in formed.definitions} <= {"source", "graph", "both"}
        counted = [r for r in formed.definitions if r.form != "source"]
        assert sum(r.sites for r in counted) == sum(r.sites for r in plain.definitions)


def test_versions_are_of_what_is_installed() -> None:
    assert versions()["torch"] == torch.__version__
    assert versions()["transformers"] != "not installed"


def test_the_own_version_is_known_in_a_source_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise module.PackageNotFoundError(package)

    monkeypatch.setattr(module, "version", absent)
    assert versions()["tilegym-fx"] == __version__
    assert versions()["cuda-tile"] == "not installed"
