"""A survey of a whole model: rows that add up, phases, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_checks import INVENTORY
from tiny_models import config_of

from tilegym_fx.cost import get_device
from tilegym_fx.errors import ExportError, UnknownModelError
from tilegym_fx.plan import Policy
from tilegym_fx.results import Frame, Rejection, Site
from tilegym_fx.survey import Survey, _miss_rows, as_json, op_name, short, survey

POLICY = Policy(get_device("h200"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a local folder that holds a configuration and no weights."""
    path = tmp_path_factory.mktemp("llama")
    config_of("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> Survey:
    return survey(str(folder), INVENTORY, POLICY, seq=24)


def test_a_survey_knows_its_model(found: Survey, folder: Path) -> None:
    assert (found.class_name, found.source.model_type, found.device) == ("LlamaForCausalLM", "llama", "H200")
    assert (found.batch, found.seq, found.dtype) == (1, 24, "bfloat16")
    assert found.parameters > 0


def test_both_phases_are_there(found: Survey) -> None:
    assert [phase.phase for phase in found.phases] == ["prefill", "decode"]
    assert all(phase.error is None and phase.nodes > 0 for phase in found.phases)
    assert found.sites == sum(row.sites for phase in found.phases for row in phase.definitions)


def test_shares_add_up_to_one(found: Survey) -> None:
    for phase in found.phases:
        covered = sum(row.time_share for row in phase.definitions)
        assert covered == pytest.approx(phase.coverage)
        assert covered + sum(row.time_share for row in phase.uncovered) == pytest.approx(1)


def test_rows_come_by_time(found: Survey) -> None:
    for phase in found.phases:
        for rows in (phase.definitions, phase.uncovered):
            shares = [row.time_share for row in rows]
            assert shares == sorted(shares, reverse=True)


def test_rows_say_where_in_the_source(found: Survey) -> None:
    (norms, *_) = [row for row in found.phases[0].definitions if "norm" in row.name]
    assert "transformers/models/llama/modeling_llama.py:" in norms.where
    assert "model." in norms.where


def test_seconds_of_every_stage(found: Survey) -> None:
    for phase in found.phases:
        assert list(phase.seconds) == ["export", "normalize", "match", "plan"]


def test_json_is_json(found: Survey) -> None:
    assert json.loads(json.dumps(as_json(found)))["model_type"] == "llama"


def test_one_phase_on_request(folder: Path) -> None:
    found = survey(str(folder), INVENTORY, POLICY, seq=24, phases=["decode"], dtype=torch.float32)
    assert [phase.phase for phase in found.phases] == ["decode"]
    assert {row.kind for row in found.phases[0].definitions} == {"compatible"}


def test_progress_is_told(folder: Path) -> None:
    told: list[str] = []
    survey(str(folder), INVENTORY, POLICY, seq=8, phases=["prefill"], progress=told.append)
    assert "exporting prefill" in told


def failing(message: str) -> Callable[..., Any]:
    def export(*_: Any) -> Any:
        raise ExportError(message)

    return export


def test_a_phase_that_cannot_be_captured_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_fx import survey as module

    original = module.export_phase

    def export(model: Any, phase: str, *rest: Any) -> Any:
        if phase == "decode":
            raise ExportError("this model has no cache")
        return original(model, phase, *rest)

    monkeypatch.setattr(module, "export_phase", export)
    found = survey(str(folder), INVENTORY, POLICY, seq=8)
    assert found.phases[1].error is not None
    assert as_json(found)["phases"][1] == {"phase": "decode", "error": found.phases[1].error}


def test_no_phase_at_all_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegym_fx.survey.export_phase", failing("all of it is dynamic"))
    with pytest.raises(ExportError, match="no phase of .* can be captured: all of it is dynamic"):
        survey(str(folder), INVENTORY, POLICY, seq=8)


def test_an_unknown_model() -> None:
    with pytest.raises(UnknownModelError):
        survey("no-such-type", INVENTORY, POLICY)


class TestMisses:
    """The nearest miss of each Definition and class."""

    def rejection(self, name: str, module: str, depth: int, reason: str) -> Rejection:
        return Rejection(name, "reference", lambda: reason, (), depth, Site("a.b", module))

    def test_the_deepest_of_each_class(self) -> None:
        rows = list(_miss_rows([
            self.rejection("rms_norm", "Norm", 2, "far"),
            self.rejection("rms_norm", "Norm", 6, "near"),
            self.rejection("rms_norm", "Other", 1, "elsewhere"),
        ]))  # fmt: skip
        assert sorted(row.reason for row in rows) == ["elsewhere", "near"]

    def test_what_another_match_has_is_none(self) -> None:
        assert list(_miss_rows([self.rejection("rms_norm", "Norm", 9, "overlaps add_rms_norm, which saves more")])) == []


def test_a_site_in_one_line() -> None:
    frame = Frame("/somewhere/site-packages/transformers/models/x/modeling_x.py", 12, "forward")
    assert short(Site("model.norm", "Norm", (frame,))) == "model.norm (Norm) transformers/models/x/modeling_x.py:12"
    assert short(Site("model.norm", "Norm", (frame,)), path=False) == "Norm transformers/models/x/modeling_x.py:12"
    assert short(Site()) == "? (?) no source line"


def test_an_op_without_its_overload() -> None:
    graph = torch.fx.Graph()
    assert op_name(graph.call_function(torch.ops.aten.mul.Tensor, (1, 2))) == "aten.mul"
    assert op_name(graph.call_function(len, ([],))) == "len"
