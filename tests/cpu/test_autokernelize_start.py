"""The start of the kernel loop: what cannot be is refused in one line, before anything is written or said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from planted_model import write_model, write_root

from tilegym_fx.autokernelize import __main__ as command
from tilegym_fx.autokernelize import experiment, loop
from tilegym_fx.autokernelize import ledger as book
from tilegym_fx.autokernelize.child import Answer
from tilegym_fx.autokernelize.experiment import Reply
from tilegym_fx.autokernelize.figures import Figures
from tilegym_fx.autokernelize.ledger import Ledger, Row
from tilegym_fx.autokernelize.options import Options
from tilegym_fx.autokernelize.page import page
from tilegym_fx.autokernelize.preflight import environment, require_clean
from tilegym_fx.autokernelize.repository import Repository
from tilegym_fx.autokernelize.start import start
from tilegym_fx.errors import TilegymFxError, UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, an inventory in a repository, and a plain file; no child is ever started."""
    (tmp_path / "root").mkdir()
    write_root(tmp_path / "root")
    write_model(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "ask", lambda *_: pytest.fail("a child was started"))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command line is refused with."""
    assert command.main([*arguments, "--dry-run", "--alone"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt2 --results /proc/nope", "'/proc/nope/gpt2' cannot be written"),
        ("gpt2 --results file", "'file/gpt2' cannot be written"),
        ("gpt2 --library /nope", "--library /nope: '/nope' is not a folder"),
        ("gpt2 --device nosuch", "unknown device 'nosuch'"),
        ("gpt2 --layers 0", "--layers 0 of a model that has 12"),
        ("gpt2 --layers 99", "--layers 99 of a model that has 12"),
        ("gpt2 --max-experiments -1", "--max-experiments -1 is negative"),
        ("gpt2 --give-up-after -1", "--give-up-after -1 is negative"),
        ("./gptt", "'./gptt' is no id and no folder that is here"),
        ("nowhere.py::make", "nowhere.py does not exist"),
        ("planted.py::nothing", "planted.py has no function 'nothing'"),
        ("broken.py::make", "broken.py cannot be read as Python: "),
        ("planted.py::make --layers 2", "has the layers that its function gives it"),
        ("gpt2 --root nowhere", "nowhere' is not a folder"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    before, head = everything(folder), Repository(folder / "root").head
    root = () if "--root" in arguments else ("--root", "root")
    assert message in refused(capsys, *arguments.split(), *root)
    assert everything(folder) == before
    assert Repository(folder / "root").head == head


def test_a_refusal_makes_no_repository(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = folder / "plain"
    for name in ("definitions", "solutions"):
        (plain / name).mkdir(parents=True)
    refused(capsys, "gpt2", "--root", "plain", "--init", "--results", "file")
    assert not (plain / ".git").exists()
    start(Options("gpt2", plain, folder / "results", dry_run=True, alone=True, init=True))
    assert (plain / ".git").is_dir()


def test_a_root_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file' cannot be written"):
        Repository(tmp_path / "file", init=True)


@pytest.mark.parametrize("function", ["make", "Planted", "nn"])
def test_any_name_of_a_file_is_left_to_the_child(folder: Path, function: str) -> None:
    repository, run_book = start(asked(folder, f"planted.py::{function}"))
    assert repository.changes() == []
    assert run_book.rows == []


def asked(folder: Path, model: str = "gpt2") -> Options:
    return Options(model, folder / "root", folder / "results", dry_run=True, alone=True)


def kept(folder: Path, **changes: str) -> Options:
    """An earlier run of gpt2 with one row."""
    found = environment(dry_run=True, device="h200") | changes
    book.save(Ledger("gpt2", found, [Row(0, "keep", "baseline")]), folder / "results")
    return asked(folder)


def test_a_refusal_says_nothing_of_an_earlier_runs_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(folder)
    said = refused(capsys, "gpt2", "--root", "root", "--results", "results", "--device", "h100")
    assert "has other figures: estimated for h200, no GPU was used" in said
    assert not (folder / "results" / "gpt2_report.html").exists()


def test_an_earlier_run_without_a_row_blocks_nothing(folder: Path) -> None:
    book.save(Ledger("gpt2", {"figures": "estimated for nosuch"}), folder / "results")
    assert start(asked(folder))[1] == Ledger("gpt2", environment(dry_run=True, device="h200"))


def test_a_baseline_that_fails_leaves_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "ask", lambda *_: Answer("crash", why="it was killed"))
    arguments = ["gpt2", "--dry-run", "--alone", "--root", "root", "--results", "results"]
    assert command.main(arguments) == 1
    assert "page:" not in capsys.readouterr().out
    assert not (folder / "results").exists()


@pytest.mark.parametrize("layers", ["2", None])
def test_a_run_of_other_layers_is_another_run(folder: Path, layers: str | None) -> None:
    """Whichever of the two was cut."""
    options = kept(folder, **({"layers": "the first 2"} if layers is None else {}))
    said = "the first 2" if layers is None else "not given"
    cut = Options(**{**vars(options), "layers": layers and int(layers)})
    with pytest.raises(UsageError, match=f"has other layers: {said}"):
        start(cut)


def test_only_what_is_more_is_counted(folder: Path) -> None:
    repository = Repository(folder / "root")
    (folder / "root" / "dirty.txt").write_text("")
    with pytest.raises(UsageError, match=r"not clean: dirty\.txt\. "):
        require_clean(repository, folder / "results")
    (folder / "root" / "more.txt").write_text("")
    with pytest.raises(UsageError, match=r"not clean: dirty\.txt \(and 1 more\)\. "):
        require_clean(repository, folder / "results")


def test_a_value_that_looks_like_an_option_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["gpt2", "--time-limit", "-5m"])
    said = capsys.readouterr().err
    assert said.startswith("error: argument --time-limit: expected one argument. ")
    assert said.count("\n") == 1


def test_ctrl_c_at_the_start_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Options) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "start", interrupted)
    assert command.main(["gpt2", "--dry-run"]) == 130
    assert capsys.readouterr().err.startswith("error: interrupted before anything was tried. Start it again")


def test_the_help_says_where_a_run_goes_on() -> None:
    said = " ".join(command.parser().format_help().split())
    assert "started again with the same arguments, in the same folder" in said


def test_a_fault_of_the_shipped_inventory_has_a_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = folder / "shipped"
    write_root(made(shipped))
    spoil(shipped)
    monkeypatch.setattr(experiment, "shipped_root", lambda: shipped)
    together = Options("gpt2", folder / "root", folder / "results", dry_run=True)
    with pytest.raises(TilegymFxError, match="--alone leaves the shipped inventory out"):
        start(together)
    assert start(asked(folder))[1].rows == []
    spoil(folder / "root")
    with pytest.raises(TilegymFxError) as caught:
        start(together)
    assert "--alone" not in str(caught.value)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def spoil(root: Path) -> None:
    """A Definition without a field that it needs."""
    file = root / "definitions" / "silu_mul.json"
    record = json.loads(file.read_text())
    del record["outputs"]
    file.write_text(json.dumps(record))


def answering(replies: Sequence[Reply]) -> Iterator[Answer]:
    return (Answer("answered", reply) for reply in replies)


def test_what_is_left_is_what_the_last_kept_row_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(status: str, key: str, coverage: float, left: list[tuple[str, float]]) -> Reply:
        return Reply(status, key, key, figures=Figures(coverage, 100.0).as_json(), uncovered=left)

    baseline = reply("baseline", "", 0.5, [("Slow a.py:1", 2e-6), ("Fast a.py:2", 1e-6)])
    better, worse = reply("right", "1", 0.9, [("Fast a.py:2", 1e-6)]), reply("right", "2", 0.5, [("None a.py:3", 1.0)])
    last = reply("right", "3", 1.0, [])
    for replies, left in (
        ((baseline, better, worse), [("Fast a.py:2", 1e-6)]),
        ((baseline, better, last), []),
    ):
        answers = answering([*replies, Reply("nothing")])
        monkeypatch.setattr(loop, "ask", lambda *_, answers=answers: next(answers))
        options = Options(**{**vars(asked(folder)), "results": folder / f"results {len(left)}"})
        done = loop.run(options, lambda line: None)
        assert done.uncovered == left
        assert book.read(options.results, "gpt2") == done
        assert ("Fast a.py:2" in page(done, options.root, options.results)) is bool(left)
