"""`check`: every fault is one line with file, field and advice, and no fault hides another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inventory_roots import SOURCE, definition, solution, with_reference, write_json, write_repository

from tilegym_fx.errors import Fault
from tilegym_fx.inventory import check as check_module
from tilegym_fx.inventory import shipped_root
from tilegym_fx.inventory.check import check

RUN = "import torch\n\n\ndef run(x, scale):\n    return x * scale\n"
SHA = "0123456789abcdef0123456789abcdef01234567"
Change = Callable[[Path], Any]


def faults_of(root: Path, *, execute: bool = False) -> list[Fault]:
    return check([root], execute=execute).faults


def test_the_shipped_inventory_has_no_faults() -> None:
    result = check([shipped_root()])
    assert [str(fault) for fault in result.faults] == []
    assert result.notes == []
    assert result.definitions >= 20


def changed_definition(**changes: Any) -> Change:
    return lambda root: write_json(root / "definitions" / "scaled.json", definition(**changes))


def changed_solution(**changes: Any) -> Change:
    return lambda root: write_json(root / "solutions" / "scaled.json", solution(**changes))


def changed_spec(**changes: Any) -> Change:
    return changed_solution(spec={**solution()["spec"], **changes})


def cited(link: str) -> Change:
    return changed_definition(reference=f"# Source: {link}\n{RUN}")


def written(file: str, text: str) -> Change:
    return lambda root: write_json(root / file, text)


ONE_FAULT: dict[str, tuple[Change, str, str]] = {
    "malformed JSON": (written("definitions/a.json", "{"), "a.json: line 1, column 2", "is no JSON"),
    "not an object": (written("definitions/a.json", "[]"), "a.json", "is not valid"),
    "not UTF-8": (lambda root: (root / "definitions" / "a.json").write_bytes(b"\xff"), "a.json", "UTF-8"),
    "a folder": (lambda root: (root / "definitions" / "a.json").mkdir(), "a.json", "cannot be read"),
    "too deep": (written("definitions/a.json", "[" * 100_000), "a.json", "nested too deeply"),
    "a key twice": (written("solutions/a.json", '{"name": 1, "name": 2}'), "a.json: name", "twice"),
    "NaN": (written("solutions/a.json", '{"name": NaN}'), "a.json", "NaN"),
    "unknown key": (changed_definition(colour="red"), "scaled.json: colour", "no key of the schema"),
    "missing key": (
        written(
            "solutions/scaled.json",
            '{"name": "a", "definition": "scaled", "author": "b", "sources": [{"path": "a.py"}]}',
        ),
        "scaled.json: spec",
        "is missing",
    ),
    "unknown axis": (
        changed_definition(axes={"N": {"type": "var"}}, outputs={"o": {"shape": ["N"], "dtype": "bool"}}),
        "scaled.json: inputs.x.shape",
        "'D'",
    ),
    "axis without a type": (
        changed_definition(axes={"N": {"type": "var"}, "D": {}}),
        "scaled.json: axes.D",
        "has no `type`",
    ),
    "inputs out of order": (
        changed_definition(inputs=dict(reversed(definition()["inputs"].items()))),
        "scaled.json: inputs",
        "order of `run`",
    ),
    "extra parameter": (
        changed_definition(reference=SOURCE + RUN.replace("scale)", "scale, bias=None)")),
        "scaled.json: reference",
        "'bias'",
    ),
    "input is written": (
        changed_definition(
            inputs={
                **definition()["inputs"],
                "x": {"shape": ["N", "D"], "dtype": "bfloat16", "inplace_output": True},
            }
        ),
        "scaled.json: inputs.x.inplace_output",
        "is true",
    ),
    "no source": (changed_definition(reference=RUN), "scaled.json: reference", "does not begin with"),
    "source further down": (
        changed_definition(reference=RUN + SOURCE),
        "scaled.json: reference",
        "begin with",
    ),
    "source on a branch": (
        cited("https://github.com/o/r/blob/main/a.py#L1"),
        "scaled.json: reference",
        "'main'",
    ),
    "source on a short SHA": (
        cited(f"https://github.com/o/r/blob/{SHA[:9]}/a.py#L1"),
        "scaled.json: reference",
        "neither a full commit",
    ),
    "source on a release branch": (
        cited("https://github.com/o/r/blob/v5.24-release/a.py#L1"),
        "scaled.json: reference",
        "'v5.24-release'",
    ),
    "source without lines": (
        cited(f"https://github.com/o/r/blob/{SHA}/a.py"),
        "scaled.json: reference",
        "#L10",
    ),
    "source backwards": (
        cited(f"https://github.com/o/r/blob/{SHA}/a.py#L9-L2"),
        "scaled.json: reference",
        "before",
    ),
    "source elsewhere": (cited("https://example.org/a.py#L1"), "scaled.json: reference", "no link to a file"),
    "fused from one region": (
        changed_definition(tags=[*definition()["tags"], "fused"]),
        "scaled.json: reference",
        "one upstream region",
    ),
    "tag without namespace": (
        changed_definition(tags=["status:draft", "llama"]),
        "scaled.json: tags",
        "'llama'",
    ),
    "tag of another namespace": (
        changed_definition(tags=["status:draft", "a:b"]),
        "scaled.json: tags",
        "'a:b'",
    ),
    "tag of an unknown status": (
        changed_definition(tags=["status:fine"]),
        "scaled.json: tags",
        "'status:fine'",
    ),
    "tag twice": (
        changed_definition(tags=["status:draft", "model:a", "model:a"]),
        "scaled.json: tags",
        "twice",
    ),
    "no status": (changed_definition(tags=[]), "scaled.json: tags", "exactly one `status:`"),
    "unused axis": (
        changed_definition(axes={**definition()["axes"], "Z": {"type": "var"}}),
        "scaled.json: axes.Z",
        "in no shape",
    ),
    "constraint on nothing": (changed_definition(constraints=["Q > 1"]), "scaled.json: constraints", "'Q'"),
    "no description": (changed_definition(description=None), "scaled.json: description", "missing"),
    "Definition in a sub-folder": (
        lambda root: write_json(root / "definitions" / "x" / "b.json", definition("b")),
        "b.json",
        "sub-folder",
    ),
    "Definition under another name": (
        lambda root: write_json(root / "definitions" / "b.json", definition("c")),
        "b.json: name",
        "'c'",
    ),
    "Solution without Definition": (changed_solution(definition="gone"), "scaled.json: definition", "'gone'"),
    "another language": (changed_spec(language="triton"), "scaled.json: spec.language", "'triton'"),
    "unknown hardware": (
        changed_spec(target_hardware=["H100"]),
        "scaled.json: spec.target_hardware",
        "'H100'",
    ),
    "destination passing": (
        changed_spec(destination_passing_style=True),
        "scaled.json: spec.destination_passing_style",
        "is true",
    ),
    "missing function": (
        changed_spec(entry_point="kernels/scaled.py::other"),
        "scaled.json: spec.entry_point",
        "no function 'other'",
    ),
    "entry point that is a number": (
        lambda root: (
            written("kernels/scaled.py", "def scaled(x, scale): ...\nother = 3\n")(root),
            changed_spec(entry_point="kernels/scaled.py::other")(root),
        ),
        "scaled.json: spec.entry_point",
        "no function 'other'",
    ),
    "a pipe among the files": (
        lambda root: os.mkfifo(root / "definitions" / "pipe.json"),
        "pipe.json",
        "no regular file",
    ),
    "missing kernel": (
        lambda root: (root / "kernels" / "scaled.py").unlink(),
        "scaled.json: sources.0.path",
        "does not exist",
    ),
    "a file that the kernel imports and nobody listed": (
        lambda root: (
            written("kernels/scaled.py", "from .tiles import width\n\ndef scaled(x, scale): ...\n")(root),
            written("kernels/tiles.py", "width = 16\n")(root),
        ),
        "scaled.json: sources",
        "kernels/tiles.py is imported and not listed",
    ),
    "a file listed that nothing imports": (
        lambda root: (
            written("kernels/tiles.py", "width = 16\n")(root),
            changed_solution(sources=[{"path": "kernels/scaled.py"}, {"path": "kernels/tiles.py"}])(root),
        ),
        "scaled.json: sources",
        "listed and imported by none",
    ),
    "kernel elsewhere": (
        lambda root: (
            written("other/scaled.py", "def scaled(x, scale): ...\n")(root),
            changed_solution(
                sources=[{"path": "other/scaled.py"}],
                spec={**solution()["spec"], "entry_point": "other/scaled.py::scaled"},
            )(root),
        ),
        "scaled.json: spec.entry_point",
        "its file is 'other/scaled.py'",
    ),
    "kernel of other parameters": (
        written("kernels/scaled.py", "def scaled(scale, x): ...\n"),
        "scaled.json: spec.entry_point",
        "(scale, x)",
    ),
    "kernel that is no Python": (
        written("kernels/scaled.py", "def scaled(:\n"),
        "scaled.json: spec.entry_point",
        "no valid Python",
    ),
    "embedded kernel": (
        changed_solution(sources=[{"path": "kernels/scaled.py", "content": "def scaled(x, scale): 1"}]),
        "scaled.json: sources.0.content",
        "is embedded",
    ),
    "pattern of nothing": (written("patterns/other.py", ""), "other.py", "no Definition 'other'"),
    "pattern that is no Python": (written("patterns/scaled.py", "def ("), "scaled.py", "no valid Python"),
}


@pytest.mark.parametrize("case", ONE_FAULT)
def test_one_mistake_is_one_fault(tmp_path: Path, case: str) -> None:
    change, where, text = ONE_FAULT[case]
    root = write_repository(tmp_path)
    change(root)
    [fault] = faults_of(root)
    assert ": ".join(filter(None, (Path(fault.file).name, fault.field))) == where
    assert text in fault.problem + fault.fix
    assert fault.fix


def test_files_that_a_listed_file_imports_in_turn_are_listed_too(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    written("kernels/scaled.py", "from .tiles import width\n\ndef scaled(x, scale): ...\n")(root)
    written("kernels/tiles.py", "from . import powers\n")(root)
    written("kernels/powers.py", "two = 2\n")(root)
    paths = [f"kernels/{name}.py" for name in ("scaled", "tiles", "powers")]
    changed_solution(sources=[{"path": path} for path in paths])(root)
    assert faults_of(root) == []


@pytest.mark.parametrize(("folder", "record"), [("definitions", definition()), ("solutions", solution())])
def test_two_records_of_one_name_are_a_fault(tmp_path: Path, folder: str, record: dict[str, Any]) -> None:
    root = write_repository(tmp_path)
    write_json(root / folder / "twin.json", record)
    problems = {fault.problem for fault in faults_of(root)}
    assert f"'scaled' is taken by {root / folder / 'scaled.json'}" in problems
    assert len(problems) == 1


def test_a_bad_file_hides_no_other(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    for number in range(3):
        write_json(root / "definitions" / f"bad{number}.json", "{")
        write_json(root / "solutions" / f"bad{number}.json", solution(f"bad{number}", definition=f"bad{number}"))
        write_json(root / "definitions" / f"worse{number}.json", definition(f"worse{number}", tags=["x"]))
    write_json(root / "solutions" / "lost.json", solution("lost", definition="gone", description=None))
    faults = faults_of(root)
    assert {f.field for f in faults if Path(f.file).stem == "lost"} == {"definition", "description"}
    assert len([f for f in faults if "is no JSON" in f.problem]) == 3
    assert len([f for f in faults if "'x'" in f.problem]) == 3
    orphans = [Path(f.file).stem for f in faults if "there is no Definition" in f.problem]
    assert orphans == ["lost"], "the Definitions of the others are only unreadable"


def test_what_references_do_wrong_is_found_and_hides_nothing(tmp_path: Path) -> None:
    bodies = {
        "raises": ("raise ValueError('too\\nbad')", "raises ValueError: too bad"),
        "shape": (
            "return x.t() * scale",
            "returns 'output' in shape [5, 3] where [N, D] = [3, 5] is declared",
        ),
        "dtype": ("return x.float()", "returns 'output' as float32 where bfloat16 is declared"),
        "number": ("return 1", "returns 'output' as a int where a tensor is declared"),
        "count": ("return x, x", "returns 2 values where 1 are declared"),
        "writes": ("return x.mul_(scale)", "writes to its input 'x'"),
        "interrupts": ("raise KeyboardInterrupt", "raises KeyboardInterrupt"),
        "exits": ("import os; os._exit(7)", "ended the process (exit code 7)"),
        "prints": ("print('{', flush=True); return x.t()", "in shape"),
    }
    records = [with_reference(name, body) for name, (body, _) in bodies.items()]
    faults = {Path(f.file).stem: f for f in faults_of(write_repository(tmp_path, *records), execute=True)}
    assert {name: fault.field for name, fault in faults.items()} == dict.fromkeys(bodies, "reference")
    for name, (_, text) in bodies.items():
        assert text in faults[name].problem


def test_a_reference_that_hangs_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_PATIENCE", 2.0)
    root = write_repository(tmp_path, with_reference("hangs", "while True: pass"))
    [fault] = faults_of(root, execute=True)
    assert Path(fault.file).stem == "hangs"
    assert "took longer than 2 s" in fault.problem


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ('{"x": ("...", "columns")}', None),
        ('{"x": None}', None),
        ('{"z": ("rows",)}', "has 'z', which is no tensor"),
        ('{"x": ("rows",)}', "x has 2 dimensions, not 1"),
        ('{"x": ("unknown or 1", "columns")}', "refuses what the Definition declares"),
    ],
)
def test_other_shapes_are_of_inputs_and_wider_than_declared(tmp_path: Path, shapes: str, problem: str | None) -> None:
    root = write_repository(tmp_path)
    write_json(root / "patterns" / "scaled.py", f'"""Shapes."""\n\nSHAPES = {shapes}\n')
    found = [fault.problem for fault in faults_of(root, execute=True) if fault.field == "SHAPES"]
    assert len(found) == (problem is not None)
    assert all(problem is not None and problem in text for text in found)


def test_spellings_are_run_where_their_guards_let_them(tmp_path: Path) -> None:
    root = write_repository(tmp_path, definition("other"))
    guard = "from tilegym_fx.spelling import guard\n\n\n@guard\ndef short(x):\n    return None\n"
    write_json(root / "patterns" / "other.py", guard)
    write_json(
        root / "patterns" / "scaled.py",
        '''"""Spellings."""
from tilegym_fx.spelling import guard, spelling

LINES = "https://github.com/org/repo/blob/v1.2.3/model.py#L1"

@spelling(source=LINES)
def fine(x, scale):
    return scale * x

@spelling(source=LINES)
def for_squares(x, scale):
    assert x.shape[0] == x.shape[1]
    return scale * x

@spelling(source=LINES)
def refused(x, scale):
    raise ValueError

@guard(only="refused")
def never(x, scale):
    return "never"

@spelling(source=LINES)
def wide(x, scale):
    return x.float()

@spelling(source=LINES)
def raising(x, scale):
    raise ValueError("no")

@spelling(source=LINES)
def turned(scale, x):
    return x

@spelling(source="https://github.com/org/repo/blob/main/model.py#L1")
def on_a_branch(x, scale):
    return x * scale
''',
    )
    root_faults = {fault.field: fault.problem for fault in faults_of(root, execute=True)}
    assert root_faults.keys() == {"wide", "raising", "turned", "on_a_branch", "short"}
    assert "float32" in root_faults["wide"]
    assert "ValueError: no" in root_faults["raising"]
    assert "(scale, x)" in root_faults["turned"]
    assert "'main'" in root_faults["on_a_branch"]
    assert "(x)" in root_faults["short"]


def test_no_exec_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\n"
    root = write_repository(tmp_path / "root", definition("writes", reference=SOURCE + code + RUN))
    write_json(root / "kernels" / "scaled.py", f"{code}def scaled(x, scale): ...\n")
    write_json(root / "patterns" / "scaled.py", code)
    assert faults_of(root, execute=False) == []
    assert not mark.exists()
    faults_of(root, execute=True)
    assert mark.exists()
