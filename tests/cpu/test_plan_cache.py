"""A second start of a model searches for nothing, is verified all the same, and makes anew what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers.models.llama import modeling_llama

from tilegym_fx import kernelize, live, plan_cache, planner, report, restore
from tilegym_fx.apply import is_applied
from tilegym_fx.errors import UsageError
from tilegym_fx.verify import MemoryVerifyError

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder after a first start of `llama()`."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("TILEGYM_FX_CACHE", str(folder))
        patch.setenv("TILEGYM_FX_PLANS", "1")
        kernelize(llama())
    return folder


@pytest.fixture
def plans(first_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans, of which one is kept: of `llama()`."""
    shutil.copytree(first_start, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TILEGYM_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEGYM_FX_PLANS", "1")
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that are searched from now on."""
    searched: list[Any] = []
    plan = planner.plan_source_form

    def counting(model: Any, **options: Any) -> Any:
        searched.append(model)
        return plan(model, **options)

    monkeypatch.setattr(planner, "plan_source_form", counting)
    return searched


def llama(**changes: Any) -> Any:
    return tiny_models.build("llama", torch.float32, **changes)


def kept(plans: Path) -> dict[str, Any]:
    (file,) = plans.iterdir()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def write(plans: Path, text: str) -> None:
    (file,) = plans.iterdir()
    file.write_text(text)


def told(model: Any) -> str:
    """Its report but for the line that says that it was kept."""
    return "\n".join(line for line in str(report(model)).splitlines() if "an earlier start" not in line)


def test_a_second_start_searches_nothing_and_reports_the_same(plans: Path, searches: list[Any]) -> None:
    again = kernelize(llama())
    assert not searches
    assert is_applied(again)
    found = report(again)
    assert found.kept
    assert "an earlier start" in str(found)
    assert found.checks
    assert all(check.passed for check in found.checks)
    restore(again)
    plans.joinpath(*[file.name for file in plans.iterdir()]).unlink()
    anew = kernelize(again)
    assert len(searches) == 1
    assert not report(anew).kept
    assert told(again) == told(anew)
    assert found.text == report(anew).text
    assert found.misses() == report(anew).misses()
    assert found.counts() == report(anew).counts()
    assert [(r.reason, str(r.site)) for r in found.rejections] == [
        (r.reason, str(r.site)) for r in report(anew).rejections
    ]


SEARCHING = ["networkx", *(f"tilegym_fx.{name}" for name in (
    "emit", "match", "normalize", "pattern", "pipeline", "plan", "planner", "provenance"
))]  # fmt: skip
START = f"""
import sys, tiny_models, torch, tilegym_fx
tilegym_fx.kernelize(tiny_models.build("llama", torch.float32))
print(*[name for name in {SEARCHING} if name in sys.modules])
"""


def imported_by_a_start(folder: Path) -> list[str]:
    """What of the search a process imports that kernelizes `llama()`, with its plans in a folder."""
    own = {"TILEGYM_FX_CACHE": str(folder), "TILEGYM_FX_PLANS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", START], env={**os.environ, **own}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_second_start_imports_nothing_to_search_with(tmp_path: Path) -> None:
    assert imported_by_a_start(tmp_path) == SEARCHING
    assert imported_by_a_start(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"hidden_act": "gelu"}, {}),
        ({"rms_norm_eps": 1e-3}, {}),
        ({}, {"skip": ["linear"]}),
        ({}, {"only": ["linear"]}),
    ],
    ids=["activation", "epsilon", "skip", "only"],
)
def test_another_model_or_other_options_are_searched(
    plans: Path, searches: list[Any], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    kernelize(llama(**changes), **options)
    assert len(searches) == 1
    assert len(list(plans.iterdir())) == 2
    kernelize(llama(**changes), **options)
    assert len(searches) == 1


@pytest.mark.parametrize("option", ["only", "skip"])
def test_names_from_a_generator_are_read_once(plans: Path, option: str) -> None:
    names = ["linear", "rms_norm"]
    for given in (names, (name for name in names), tuple(names)):
        expected = report(kernelize(llama(), **{option: names})).counts()
        assert report(kernelize(llama(), **{option: given})).counts() == expected
        assert ("linear" in expected) == (option == "only")


def test_a_string_is_one_name(plans: Path) -> None:
    assert list(report(kernelize(llama(), only="linear_silu_mul")).counts()) == ["linear_silu_mul"]


@pytest.mark.parametrize("given", [3, ["linear", 3], [["linear"]]])
def test_what_is_no_list_of_names_is_told(plans: Path, given: Any) -> None:
    for option in ("only", "skip"):
        with pytest.raises(UsageError, match=f"{option}=.* is no list of names"):
            kernelize(llama(), **{option: given})


def test_a_function_exchanged_for_one_start_costs_later_ones_nothing(
    plans: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing of ours stands for it, what was kept would fit the model without the change too, with less."""
    whole = report(kernelize(llama())).counts()
    inner = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: tuple(x + 0 for x in inner(*args)))
        fewer = report(kernelize(llama())).counts()
    assert sum(fewer.values()) < sum(whole.values())
    assert report(kernelize(llama())).counts() == whole
    assert len(searches) == 1


def test_a_plan_is_not_lost_where_memory_runs_out(
    plans: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryVerifyError("no memory")

    monkeypatch.setattr(live, "judged", no_memory)
    before = kept(plans)
    with pytest.raises(MemoryVerifyError):
        kernelize(llama())
    assert not searches
    assert kept(plans) == before


def test_another_version_of_our_code_searches_anew(
    plans: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "_code_digest", lambda: "of other code")
    kernelize(llama())
    assert len(searches) == 1


def test_it_can_be_switched_off(plans: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_PLANS", "0")
    kernelize(llama())
    assert len(searches) == 1


def test_more_inventories_keep_nothing(
    plans: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("definitions", "solutions"):
        (tmp_path / "more" / folder).mkdir(parents=True)
    monkeypatch.setenv("TILEGYM_FX_INVENTORY", str(tmp_path / "more"))
    kernelize(llama())
    assert len(searches) == 1
    assert len(list(plans.iterdir())) == 1


def _wrong_numbers(plan: dict[str, Any]) -> dict[str, Any]:
    """A kernel with another epsilon than the model's: it applies, and gives other numbers."""
    assert "self.variance_epsilon" in plan["text"]
    return {**plan, "text": plan["text"].replace("self.variance_epsilon", "(1.0 + self.variance_epsilon)")}


def _other_source(plan: dict[str, Any]) -> dict[str, Any]:
    """Made from another text of the methods."""
    return {**plan, "text": plan["text"].replace('sources={"forward": "', 'sources={"forward": "0')}


def _no_python(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "text": "this is\nno Python"}


def _raises(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "text": plan["text"] + "\n1 / 0\n"}


def _other_calls(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "graph_form": {}}


def _a_field_less(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name != "misses"}


@pytest.mark.parametrize("spoil", [_wrong_numbers, _other_source, _no_python, _raises, _other_calls, _a_field_less])
def test_what_does_not_fit_is_made_anew(
    plans: Path, searches: list[Any], spoil: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    before = kept(plans)
    write(plans, json.dumps(spoil(before)))
    assert kept(plans) != before
    model = llama()
    x = tiny_models.tokens(1, 5)
    expected = llama()(x).logits
    kernelize(model)
    assert len(searches) == 1
    torch.testing.assert_close(model(x).logits, expected)
    assert kept(plans) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_file_that_is_no_plan_is_written_anew(plans: Path, searches: list[Any], text: str) -> None:
    before = kept(plans)
    write(plans, text)
    kernelize(llama())
    assert len(searches) == 1
    assert kept(plans) == before


def test_a_folder_that_cannot_be_written_to_costs_nothing(
    tmp_path: Path, searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEGYM_FX_PLANS", "1")
    monkeypatch.setenv("TILEGYM_FX_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert is_applied(model := kernelize(llama()))
        assert "the next start searches again: nothing can be kept in" in str(report(model))
    assert len(searches) == 2


def test_a_model_that_cannot_be_recognised_says_so(plans: Path, searches: list[Any]) -> None:
    model = llama()
    model.model.norm.register_forward_hook(lambda *_: None)
    assert "the next start searches again: model.norm has hooks" in str(report(kernelize(model)))
    assert len(searches) == len(list(plans.iterdir())) == 1


def test_no_more_than_so_many_are_kept(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_MOST", 2)
    (first,) = plans.iterdir()
    os.utime(first, (0, 0))
    for epsilon in (1e-3, 1e-4):
        kernelize(llama(rms_norm_eps=epsilon))
    assert len(list(plans.iterdir())) == 2
    assert not first.exists()


def test_what_was_not_verified_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_PLANS", "1")
    monkeypatch.setenv("TILEGYM_FX_CACHE", str(tmp_path))
    kernelize(llama(), verify=False)
    assert not list(tmp_path.rglob("*.json"))
    kernelize(llama())
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_what_is_emitted_is_what_was_kept(plans: Path, searches: list[Any], tmp_path: Path) -> None:
    kernelize(llama(), emit=tmp_path / "mine.py")
    assert not searches
    assert (tmp_path / "mine.py").read_text() == kept(plans)["text"]
    with pytest.raises(UsageError, match="cannot be written"):
        kernelize(model := llama(), emit=tmp_path / "mine.py" / "below a file")
    assert not is_applied(model)
