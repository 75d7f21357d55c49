"""`python -m tilegym_fx.inventory`: tables, JSON, and one clear line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from inventory_roots import definition, write_json, write_repository

from tilegym_fx.inventory import load
from tilegym_fx.inventory.__main__ import main


def test_list_shows_definitions_and_their_solutions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--op-type", "rope"]) == 0
    printed = capsys.readouterr().out
    assert "rotary_embedding" in printed
    assert "silu_mul" not in printed


@pytest.mark.parametrize("columns", ["80", None], ids=["80 columns", "pipe"])
def test_list_breaks_no_name_and_ends_no_line_in_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines[:-1] if not line.startswith(" ")]
    definitions = load().definitions
    assert [(head[0], head[1]) for head in heads] == [(n, definitions[n].op_type) for n in sorted(definitions)]
    assert all(line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= int(columns or 160)
    words = {word.strip("(),;") for line in lines for word in line.split()}
    assert {word for d in definitions.values() for word in (*d.inputs, *d.outputs)} <= words
    assert {solution.name for solution in load().solutions.values()} <= words


def test_list_says_what_a_definition_takes_and_who_computes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = write_repository(tmp_path, definition("alone", tags=["status:draft"]))
    assert main(["list", "--root", str(root)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    scaled = next(n for n, line in enumerate(lines) if line.startswith("scaled "))
    assert lines[scaled + 1 : scaled + 4] == ["(x, scale) -> output", "Solution: scaled on SM90, SM100", "models: tiny"]
    alone = next(n for n, line in enumerate(lines) if line.startswith("alone "))
    assert lines[alone].endswith(" draft")
    assert lines[alone + 2] == "no Solution"


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        (["--op-type", "rmsnrom"], ["no Definition has the op_type 'rmsnrom'; did you mean `rmsnorm`"]),
        (["--tag", "model:lama"], ["no Definition has the tag 'model:lama'; did you mean `model:llama`"]),
        (["--op-type", "rope", "--tag", "model:gpt2"], []),
        (["--op-type", "rope"], []),
    ],
)
def test_a_filter_that_no_definition_has_is_told(
    capsys: pytest.CaptureFixture[str], filters: list[str], said: list[str]
) -> None:
    assert main(["list", *filters]) == 0
    assert [line[: len(said[0])] for line in capsys.readouterr().err.splitlines()] == said


def test_list_as_json_has_whole_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    assert main(["list", "--json", "--tag", "model:tiny", "--root", str(root)]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record["name"] == "scaled"
    assert record["inputs"]["scale"] == {
        "shape": None, "dtype": "float32", "description": None, "inplace_output": False,
    }  # fmt: skip
    assert record["file"] == str(root / "definitions" / "scaled.json")
    assert [solution["spec"]["entry_point"] for solution in record["solutions"]] == ["kernels/scaled.py::scaled"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--tag", "model:llama"], {n for n, d in load().definitions.items() if "model:llama" in d.tags}),
        (["--tag", "model:llama", "--tag", "model:olmo2"],
         {n for n, d in load().definitions.items() if {"model:llama", "model:olmo2"} <= set(d.tags)}),
        (["--op-type", "nothing"], set()),
    ],
)  # fmt: skip
def test_list_filters_by_tag_and_op_type(
    capsys: pytest.CaptureFixture[str], filters: list[str], expected: set[str]
) -> None:
    assert main(["list", "--json", *filters]) == 0
    assert {record["name"] for record in json.loads(capsys.readouterr().out)} == expected


def test_check_prints_faults_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = write_repository(tmp_path, definition("bad", tags=["x", "status:draft"]))
    write_json(root / "definitions" / "worse.json", "{")
    assert main(["check", str(root), "--no-exec"]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        str(root / "definitions" / f"{n}.json") for n in ("bad", "worse")
    ]
    assert printed.err == f"error: 2 fault(s) among 2 Definitions and 1 Solutions in {root}\n"


@pytest.mark.parametrize("how", [[], ["--root"]], ids=["ROOT", "--root"])
def test_check_says_ok(capsys: pytest.CaptureFixture[str], tmp_path: Path, how: list[str]) -> None:
    root = write_repository(tmp_path)
    assert main(["check", *how, str(root), "--no-exec"]) == 0
    assert capsys.readouterr().out == f"ok: 1 Definitions and 1 Solutions in {root}, nothing executed\n"


def test_export_says_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export", "--flashinfer", str(tmp_path / "set")]) == 0
    count = len(list((tmp_path / "set").rglob("*.json")))
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"ok: {count} files written to {tmp_path / 'set'}"
    assert others == ["left out, for FlashInfer-Bench has no complex numbers: rotary_embedding_complex"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "absent"], "absent' is not a folder"),
        (["check", "."], "holds no inventory"),
        (["list", "--root", "absent"], "absent' is not a folder"),
        (["export", "--flashinfer", "."], "'.' is not an empty folder"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "something").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_broken_extra_root_is_one_line_for_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    write_json(root / "definitions" / "a.json", "{")
    write_json(root / "definitions" / "b.json", "{")
    assert main(["list", "--root", str(root)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "2 fault(s)" in line
    assert "(and 1 more)" in line


def test_as_a_module_it_warns_about_nothing_and_needs_no_torch() -> None:
    code = "import sys, runpy; sys.argv = ['x', 'list']; sys.modules['torch'] = None\n"
    code += "runpy.run_module('tilegym_fx.inventory', run_name='__main__')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rms_norm" in done.stdout
