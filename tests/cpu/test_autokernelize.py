"""The kernel loop: what helps is kept, what does not is undone, and the tree is clean whatever happens.

Runs with many experiments are marked slow: each experiment is a process. `make slow` has them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch
from planted_model import write_hook, write_library, write_model, write_root
from torch.fx import Graph

from tilegym_fx.autokernelize import __main__ as command
from tilegym_fx.autokernelize import charts, experiment, figures, writing
from tilegym_fx.autokernelize import ledger as book
from tilegym_fx.autokernelize.ledger import Ledger, Row
from tilegym_fx.autokernelize.loop import _where_commits_go, run
from tilegym_fx.autokernelize.measuring import Bench, BenchError
from tilegym_fx.autokernelize.options import Options
from tilegym_fx.autokernelize.page import page
from tilegym_fx.autokernelize.preflight import environment
from tilegym_fx.autokernelize.repository import Repository
from tilegym_fx.autokernelize.start import _recover
from tilegym_fx.candidates import Candidate
from tilegym_fx.cost import get_device
from tilegym_fx.errors import UsageError
from tilegym_fx.inventory import load
from tilegym_fx.inventory.check import check
from tilegym_fx.results import Match, PlannedMatch

pytestmark = pytest.mark.xdist_group("autokernelize")  # what it sets up is made once
slow = pytest.mark.slow
#: Long enough for any experiment that is not meant to hang, on a machine that has other things to do.
LONG = 600.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's file and a library."""
    folder = tmp_path_factory.mktemp("loop")
    write_model(folder)
    write_library(folder / "library")
    return folder


def options(place: Path, root: Path, function: str, **changes: object) -> Options:
    """A dry run on a function of the planted model."""
    asked = Options(
        f"{place / 'planted.py'}::{function}",
        write_root(made(root)),
        root.parent / "results",
        LONG,
        dry_run=True,
        alone=True,
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def statuses(ledger: Ledger) -> list[str]:
    return [row.status for row in ledger.rows]


@pytest.fixture(scope="module")
def mixed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, Ledger, list[str]]:
    """A run of two experiments: a kernel that is right, and one that is not."""
    root = tmp_path_factory.mktemp("mixed") / "root"
    asked = options(place, root, "mixed", hook=write_hook(root.parent), patience=1)
    told: list[str] = []
    return asked, run(asked, told.append), told


def test_what_helps_is_kept_and_what_is_wrong_is_undone(mixed: tuple[Options, Ledger, list[str]]) -> None:
    asked, ledger, told = mixed
    assert statuses(ledger) == ["keep", "keep", "discard"]
    baseline, kept, wrong = ledger.rows
    assert "written by the hook" in kept.description
    assert "times what rounding explains" in wrong.description
    assert 0 == baseline.coverage < (kept.coverage or 0) < 1
    assert (kept.throughput or 0) > (baseline.throughput or 0)
    repository = Repository(asked.root)
    assert repository.changes() == []
    assert repository.head == ledger.head == kept.commit
    names = sorted(path.stem for path in (asked.root / "definitions").iterdir())
    assert names == sorted(["silu_mul", kept.name])
    assert told[-1] == "stopped: nothing was kept in 1 experiments"


def test_the_first_lines_say_where_commits_go_and_how_to_take_them_back(
    mixed: tuple[Options, Ledger, list[str]],
) -> None:
    asked, ledger, told = mixed
    where, back = told[0].splitlines()
    repository = Repository(asked.root)
    assert f"a commit on branch {repository.branch} of {asked.root}" in where
    assert repository.branch
    assert back.endswith(f"git -C {asked.root} reset --hard {ledger.rows[0].commit}")
    repository._git("checkout", "-q", "--detach")
    assert "no branch" in _where_commits_go(repository)
    repository._git("checkout", "-q", "-")


def test_a_commits_subject_says_where_the_kernel_comes_from(mixed: tuple[Options, Ledger, list[str]]) -> None:
    asked, ledger, _ = mixed
    subject = Repository(asked.root)._git("log", "-1", "--format=%s").strip()
    assert subject == f"autokernelize: {ledger.rows[1].name} (written by the hook)"


def test_a_run_goes_on_where_it_was_until_nothing_is_left(mixed: tuple[Options, Ledger, list[str]]) -> None:
    asked, ledger, _ = mixed
    told: list[str] = []
    assert run(replace(asked, patience=9), told.append).rows == ledger.rows
    assert told[1:] == ["stopped: nothing is left to try"]


def test_the_page_needs_nothing_else_and_holds_every_figure(mixed: tuple[Options, Ledger, list[str]]) -> None:
    asked, ledger, _ = mixed
    assert outside(page(ledger, asked.root, asked.results)) == []
    for row in ledger.rows:
        assert_shown(row, page(ledger, asked.root, asked.results))


def outside(text: str) -> list[str]:
    """What a page would fetch, from anywhere: attributes and styles that load, and scripts."""
    loads = re.findall(r"""(?:src|href|srcset|poster|data|action)\s*=\s*["'][^"'#]|url\(|@import|<script|<link""", text)
    return loads + [address for address in re.findall(r"https?://[^\s<]+", text) if f"# Source: {address}" not in text]


def assert_shown(row: Row, text: str) -> None:
    figures = [f"{row.coverage:.2%}", f"{row.throughput:,.1f}"] if row.coverage is not None else ["-"]
    for figure in (*figures, row.status, row.commit[:10], row.region):
        assert escape(figure) in text


@pytest.fixture(scope="module")
def kept(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, Ledger]:
    root = tmp_path_factory.mktemp("kept") / "root"
    asked = options(place, root, "make", libraries=(place / "library",))
    return asked, run(asked, lambda line: None)


@slow
def test_one_exact_one_compatible_and_one_new_region_are_kept(kept: tuple[Options, Ledger]) -> None:
    _, ledger = kept
    assert statuses(ledger) == ["keep"] * 4
    assert sorted(row.kind for row in ledger.rows[1:]) == ["compatible", "exact", "none"]
    how = {row.kind: row.description for row in ledger.rows[1:]}
    assert "exact: squash of library" in how["exact"]
    assert "is silu_mul with an adapter that expands its inputs to one shape" in how["compatible"]
    assert "synthesised" in how["none"]
    coverage = [row.coverage or 0.0 for row in ledger.rows]
    assert coverage == sorted(coverage)
    assert coverage[0] == 0
    assert coverage[-1] == pytest.approx(1)


@slow
def test_what_is_kept_is_committed_and_passes_inventory_check(kept: tuple[Options, Ledger]) -> None:
    asked, ledger = kept
    repository = Repository(asked.root)
    assert repository.changes() == []
    assert repository.head == ledger.head == ledger.rows[-1].commit
    for row in ledger.rows[1:]:
        assert all((asked.root / file).is_file() for file in row.files)
        assert {file.split("/")[0] for file in row.files} >= {"definitions", "solutions", "kernels"}
    faults = [fault for fault in check([asked.root]).faults if "ource" not in fault.problem]
    assert faults == []


@slow
def test_the_table_has_a_row_for_each_experiment(kept: tuple[Options, Ledger]) -> None:
    asked, _ = kept
    lines = book.table_file(asked.results, asked.model).read_text().splitlines()
    assert "| commit | cuTile coverage | cuTile throughput | status | description |" in lines
    assert len([line for line in lines if "| keep |" in line]) == 4
    assert "estimated for h200" in lines[2]


@slow
def test_a_finished_run_has_nothing_left_to_do(kept: tuple[Options, Ledger]) -> None:
    asked, ledger = kept
    told: list[str] = []
    assert run(asked, told.append).rows == ledger.rows
    assert told[1:] == ["stopped: nothing is left to try"]


@slow
def test_the_page_shows_both_bars_every_experiment_and_the_kernels(kept: tuple[Options, Ledger]) -> None:
    asked, ledger = kept
    text = page(ledger, asked.root, asked.results)
    assert text.count("<circle") == 4
    assert text.count("<details") == 3
    assert "def squash(x: torch.Tensor)" in text
    assert "torch.exp(-torch.abs(x))" in text
    assert "src=" not in text
    assert "href=" not in text
    assert "&lt;" in text


@pytest.fixture(scope="module")
def failed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Options, Ledger]:
    root = tmp_path_factory.mktemp("failed") / "root"
    asked = options(place, root, "failing", hook=write_hook(root.parent))
    return asked, run(asked, lambda line: None)


@slow
def test_wrong_slow_and_crashing_kernels_are_not_kept(failed: tuple[Options, Ledger]) -> None:
    _, ledger = failed
    found = {row.name.split("_")[0]: row for row in ledger.rows[1:]}
    assert {name: row.status for name, row in found.items()} == {
        "wrong": "discard",
        "slow": "discard",
        "crash": "crash",
    }
    assert "times what rounding explains" in found["wrong"].description
    assert "throughput would drop" in found["slow"].description
    assert "killed by signal 6" in found["crash"].description


@slow
def test_failures_leave_a_clean_tree_at_the_last_kept_commit(failed: tuple[Options, Ledger]) -> None:
    asked, ledger = failed
    repository = Repository(asked.root)
    assert repository.changes() == []
    assert repository.head == ledger.rows[0].commit
    assert sorted(path.name for path in (asked.root / "definitions").iterdir()) == ["silu_mul.json"]


@slow
def test_drafts_of_what_was_not_kept_stay_in_the_results(failed: tuple[Options, Ledger]) -> None:
    asked, ledger = failed
    for row in ledger.rows[1:]:
        folder = asked.results / book.slug(asked.model) / f"{row.number:03}"
        assert json.loads((folder / "region.json").read_text())["key"] == row.key
        assert list(folder.rglob("kernel.py"))


@slow
def test_a_hanging_experiment_is_ended_and_a_run_goes_on_where_it_was(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one", hook=write_hook(tmp_path, "hang.py"), most=0)
    assert statuses(run(asked, lambda line: None)) == ["keep"]
    ledger = run(replace(asked, most=1, limit=20.0), lambda line: None)
    assert statuses(ledger) == ["keep", "timeout"]
    assert "took longer than 20 s" in ledger.rows[1].description
    assert Repository(asked.root).changes() == []


@slow
def test_ctrl_c_leaves_a_clean_tree_and_the_run_can_be_resumed(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one", hook=write_hook(tmp_path, "hang.py"), most=0)
    run(asked, lambda line: None)
    arguments = [
        asked.model,
        "--root",
        str(asked.root),
        "--results",
        str(asked.results),
        "--hook",
        asked.hook,
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "tilegym_fx.autokernelize", *arguments, "--dry-run", "--alone"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    log = asked.results / book.slug(asked.model) / "001" / "log.txt"
    until(lambda: log.is_file())
    (asked.root / "kernels" / "half_written.py").write_text("")
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 130
    assert said.splitlines()[-1].startswith("error: interrupted")
    assert Repository(asked.root).changes() == []
    known = book.read(asked.results, asked.model)
    assert known is not None
    assert known.running is None
    assert statuses(known) == ["keep"]


def until(condition: object) -> None:
    """Wait until something is so, but not for ever."""
    for _ in range(600):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")


def test_a_run_that_was_killed_is_cleaned_up_by_the_next(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one", most=0)
    repository = Repository(asked.root)
    left = Ledger(asked.model, environment(dry_run=True, device="h200"), head=repository.head, running=1)
    left.rows.append(Row(0, "keep", "baseline", repository.head, 0.0, 1.0))
    book.save(left, asked.results)
    (asked.root / "kernels" / "half_written.py").write_text("")
    run(asked, lambda line: None)
    assert repository.changes() == []


def test_a_tree_that_is_not_clean_is_left_alone(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one")
    (asked.root / "kernels" / "mine.py").write_text("")
    with pytest.raises(UsageError, match=r"not clean: kernels/mine\.py"):
        run(asked, lambda line: None)
    assert (asked.root / "kernels" / "mine.py").exists()


def test_figures_of_two_kinds_are_not_mixed(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one", most=0)
    book.save(Ledger(asked.model, {"figures": "measured on something"}, [Row(0, "keep", "baseline")]), asked.results)
    with pytest.raises(UsageError, match="other figures: measured on something"):
        run(asked, lambda line: None)


def test_each_function_of_a_file_has_results_of_its_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(place, tmp_path / "root", "one", most=0)
    done = Ledger(
        asked.model,
        environment(dry_run=True, device="h200"),
        [Row(0, "keep", "baseline"), Row(1, "discard", "no", key="a")],
    )
    book.save(done, asked.results)
    file = asked.model.partition("::")[0]
    assert book.read(asked.results, asked.model) == done
    assert book.read(asked.results, f"{file}::mixed") is None
    monkeypatch.chdir(Path(file).parent)
    assert book.read(asked.results, f"./{Path(file).name}::one") == done
    assert book.read(asked.results, f"{tmp_path}/{Path(file).name}::one") is None


def test_models_whose_files_would_have_one_name_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    asked = Options("org/model", tmp_path / "root", tmp_path / "results", dry_run=True, init=True)
    left = Ledger("org_model", environment(dry_run=True, device="h200"), [Row(0, "keep", "baseline")])
    book.save(left, asked.results)
    with pytest.raises(UsageError, match=r"state\.json is of another model, org_model"):
        run(asked, lambda line: None)


def test_a_folder_is_made_a_repository_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "root" / "kernels").mkdir(parents=True)
    (tmp_path / "root" / "kernels" / "mine.py").write_text("")
    with pytest.raises(UsageError, match="--init"):
        Repository(tmp_path / "root")
    assert Repository(tmp_path / "root", init=True).changes() == []
    head = Repository(tmp_path / "root").head
    assert Repository(tmp_path / "root", init=True).head == head


def test_a_change_of_an_experiment_that_was_killed_is_undone_and_nobody_elses(place: Path, tmp_path: Path) -> None:
    asked = options(place, tmp_path / "root", "one", most=0)
    repository = Repository(asked.root)
    left = Ledger(asked.model, environment(dry_run=True, device="h200"), head=repository.head, running=1)
    book.save(left, asked.results)
    record = asked.root / "definitions" / "silu_mul.json"
    before = record.read_text()
    record.write_text(before.replace("status:verified", "status:changed"))
    with pytest.raises(UsageError, match=r"not clean: definitions/silu_mul\.json"):
        run(asked, lambda line: None)
    turn = asked.results / book.slug(asked.model) / "001" / "region.json"
    turn.parent.mkdir(parents=True, exist_ok=True)
    turn.write_text(json.dumps({"changes": ["definitions/silu_mul.json"]}))
    left.rows.append(Row(0, "keep", "baseline", repository.head, 0.0, 1.0))
    book.save(left, asked.results)
    _recover(repository, left, turn.parent)
    assert record.read_text() == before


def test_it_gives_up_when_nothing_is_kept() -> None:
    rows = [Row(0, "keep", "baseline"), *(Row(n, "discard", "no", key=str(n)) for n in range(1, 4))]
    assert Ledger("m", {}, rows).in_vain() == 3
    assert Ledger("m", {}, rows).last_kept is rows[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--time-limit", "soon"], "'soon' is no time limit"),
        (["mine.py::make", "--root", "{root}"], "mine.py::make cannot be measured"),
        (["gpt2", "--dry-run", "--root", "{root}"], "is in no git repository"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([argument.format(root=tmp_path) for argument in arguments]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_makes_its_own_model_takes_no_dtype(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has the dtype that its function gives it"):
        run(options(place, tmp_path / "root", "make", dtype="float32"), lambda line: None)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="--dry-run"):
        run(Options("llama", tmp_path, tmp_path), lambda line: None)


@slow
def test_what_is_measured_runs_the_roots_kernels_and_the_original_once(tmp_path: Path) -> None:
    """On the CPU a tiny model stands in, and figures mean nothing; who runs and who is judged is the same."""
    root = write_library(tmp_path / "root")
    bench = Bench("Qwen/Qwen3-0.6B", None, root, tmp_path / "reference", 240, device="cpu")
    found = bench.figures()
    assert found.measured
    assert found.throughput > 0
    logits = {file: file.stat().st_mtime_ns for file in bench.folder.glob("*.pt")}
    assert len(logits) == len(bench.cases) == 2
    with pytest.raises(BenchError, match="squash_kernel runs in the model"):  # there is no GPU, so no kernel does
        bench.figures({"squash_kernel"})
    assert {file: file.stat().st_mtime_ns for file in bench.folder.glob("*.pt")} == logits


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_the_bars_add_up_and_only_what_was_kept_is_in_them() -> None:
    rows = [
        Row(0, "keep", "baseline", coverage=0.25, throughput=100.0),
        Row(1, "keep", "one", coverage=0.5, throughput=120.0, name="one", key="1"),
        Row(2, "discard", "second", coverage=0.9, throughput=60.0, name="second", key="2"),
        Row(3, "crash", "three", key="3"),
    ]
    assert charts.gains(rows) == [("before", 0.25), ("one", 0.25)]
    assert "second" not in charts.bars(rows)
    assert charts.bars(rows).count("50.00%") == 2  # after, and everything else
    drawn = charts.timeline(rows)
    assert [drawn.count(f"dot-{kind}") for kind in ("keep", "discard", "bad")] == [2, 1, 1]
    assert "coverage 50.0%" in drawn
    assert "throughput 120" in drawn
    assert charts.bars([]) == "<p>There is no baseline.</p>"


def test_an_estimate_charges_for_copies_around_the_kernel(tmp_path: Path) -> None:
    inventory, device = load(write_library(tmp_path), shipped=False), get_device("h200")
    x, size = Graph().placeholder("x"), 64 * 384 * 2
    match = Match("squash", "reference", "exact", {"x": x}, (), ())

    def seconds(value: torch.Tensor) -> float:
        x.meta["val"] = value
        return figures.launch_seconds(PlannedMatch(match, "squash", 0.0, 0.0), inventory, device)

    packed = torch.empty(64, 768, dtype=torch.bfloat16, device="meta")[:, ::2]
    alone = device.launch_seconds + 2 * size / device.bytes_per_second
    assert seconds(packed.contiguous()) == pytest.approx(alone)
    assert seconds(packed) == pytest.approx(2 * alone)  # read once and written once more


def test_a_definition_that_waits_for_a_gpu_is_verified_by_an_experiment_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "_device", lambda request: get_device("h200"))
    root = write_root(made(tmp_path / "root"))
    record = root / "definitions" / "silu_mul.json"
    record.write_text(record.read_text().replace("status:verified", "status:unverified"))
    request = experiment.Request("any", str(root), str(tmp_path / "folder"))
    candidate = Candidate("exact", "silu_mul", "silu_mul")
    waiting = load(root, shipped=False)
    assert experiment.Experiment(request)._can_promote(candidate, waiting)
    assert not experiment.Experiment(replace(request, dry_run=True))._can_promote(candidate, waiting)
    writing.mark_verified(writing.promote(candidate, waiting, root.resolve()))
    assert "status:verified" in load(root, shipped=False).definitions["silu_mul"].tags
    assert not experiment.Experiment(request)._can_promote(candidate, load(root, shipped=False))
    assert Repository(root).changed_tracked() == []  # verified is what it was before
