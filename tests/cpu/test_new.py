"""``python -m tilegym_fx.new``: a scaffold works at once, and a fault at each of its six steps is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import ROOT

from tilegym_fx.errors import UsageError
from tilegym_fx.inventory import store
from tilegym_fx.inventory.check import check
from tilegym_fx.new import __main__ as command
from tilegym_fx.new import scaffold, steps

TITLES = ["interface", "implementation", "registration", "tests", "benchmark", "verification"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a scaffold of its own name, as ops are known by name in the whole process."""
    root = tmp_path / "kernels_of_mine"
    root.mkdir()
    scaffold.write("planted_op", scaffold.from_nothing("planted_op", "activation"), root)
    return root


def faults(root: Path, name: str, monkeypatch: pytest.MonkeyPatch, *titles: str) -> dict[str, str]:
    """Step -> what is wrong, of the steps named."""
    monkeypatch.setattr(steps, "_STEPS", tuple(s for s in steps._STEPS if s[0] in titles))
    return {step.title: step.text for step in steps.look(name, root) if step.state == "FAULT"}


def edit(root: Path, kind: str, change: Callable[[str], str]) -> None:
    path = scaffold.files_of("planted_op", root)[kind]
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


def test_a_scaffold_is_green_at_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["green_op", "--op-type", "activation", "--root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    states = {line.split()[1]: line.split()[2] for line in lines if line.strip()[:1].isdigit()}
    assert states == dict.fromkeys(TITLES, "ok")
    assert sum(line.startswith("wrote ") for line in lines) == 6
    undo = next(line for line in lines if line.startswith("undo: "))
    subprocess.run(undo.removeprefix("undo: "), shell=True, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in path.parts] == []


def test_a_file_that_is_changed_and_not_new_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "_STEPS", ())
    exact = scaffold.exact_file(tmp_path)
    exact.parent.mkdir(parents=True)
    exact.write_text("EXACT = {}\n")
    assert command.main(["one_op", "--op-type", "activation", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "changed tests/support/exact.py" in said
    assert "take one_op out of tests/support/exact.py" in said
    assert "one_op" in exact.read_text()


@pytest.mark.parametrize(
    ("op_type", "said"),
    [
        ("activation", None),
        ("activaton", "note: 'activaton' is a new op type; did you mean `activation`; there are activation, cache"),
        ("foobar", "note: 'foobar' is a new op type; there are activation, cache"),
    ],
)
def test_an_op_type_that_no_definition_has_is_told(
    op_type: str,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(steps, "_STEPS", ())
    assert command.main(["one_op", "--op-type", op_type, "--root", str(tmp_path)]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note[: len(said or "")] for note in notes] == ([said] if said else [])


def test_the_shipped_inventory_has_what_was_written_after_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a clone: ``--like`` reads the inventory first, then the new files are in it."""
    for folder in ("definitions", "solutions"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "rms_norm.json", tmp_path / folder)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    shutil.copytree(ROOT / "patterns", tmp_path / "patterns")
    for module in (store, scaffold, command):
        monkeypatch.setattr(module, "shipped_root", lambda: tmp_path)
    monkeypatch.setattr(steps, "_STEPS", tuple(s for s in steps._STEPS if s[0] in ("interface", "registration")))
    assert command.main(["wide_norm", "--op-type", "rmsnorm", "--like", "rms_norm"]) == 0
    states = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert states == ["ok", "ok"]


@pytest.mark.parametrize("like", [None, "add_rms_norm", "silu_mul_packed", "gqa_attention_masked", "rotary_embedding"])
def test_a_scaffold_passes_inventory_check_and_lint(tmp_path: Path, like: str | None) -> None:
    root = tmp_path / "root"
    root.mkdir()
    parts = (
        scaffold.from_definition("one", "activation", like, scaffold.inventory_of(root))
        if like
        else scaffold.from_nothing("one", "activation")
    )
    scaffold.write("one", parts, root)
    assert check([root]).faults == []  # that the kernel's imports are there and listed is one of its rules
    for arguments in (["check"], ["format", "--check"]):
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            *arguments,
            "--no-cache",
            "--config",
            str(ROOT / "pyproject.toml"),
            str(root),
        ]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_copied_kernel_still_computes_its_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for like in ("rms_norm_plus_one_add", "gelu_mul", "rotary_embedding_fp32"):
        name = f"copy_of_{like}"
        scaffold.write(name, scaffold.from_definition(name, "copy", like, scaffold.inventory_of(tmp_path)), tmp_path)
        assert faults(tmp_path, name, monkeypatch, "interface", "verification") == {}


def test_a_fault_in_the_interface_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        root,
        "definition",
        lambda text: text.replace("return torch.tanh(x / cap) * cap", "return (x / cap).mean(-1) * cap"),
    )
    found = faults(root, "planted_op", monkeypatch, "interface")
    assert "[N, H]" in found["interface"]
    assert "planted_op.json" in found["interface"]


def test_a_fault_in_the_implementation_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "kernel", lambda text: text.replace("ct.tanh(ct.astype(scaled, ct.float32))", "ct.tahn(scaled)"))
    found = faults(root, "planted_op", monkeypatch, "implementation")
    assert "kernels/planted_op.py" in found["implementation"]
    assert "tahn" in found["implementation"]


def test_a_fault_in_the_registration_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "solution", lambda text: text.replace('"SM90"', '"Hopper"'))
    found = faults(root, "planted_op", monkeypatch, "interface", "registration")
    assert list(found) == ["registration"]
    assert "'Hopper' is no architecture" in found["registration"]


def test_a_fault_in_the_tests_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "test", lambda text: text.replace("assert not finds", "assert finds"))
    found = faults(root, "planted_op", monkeypatch, "tests")
    assert "test_another_function_is_not_it - AssertionError: assert False" in found["tests"]
    assert f"`python -m pytest {scaffold.files_of('planted_op', root)['test']}`" in found["tests"]


@pytest.mark.parametrize(
    ("after", "reason"),
    [("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"), ("import = pytest", "SyntaxError: ")],
)
def test_a_test_file_that_cannot_be_imported_says_why(
    after: str, reason: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(root, "test", lambda text: text.replace("import pytest", after))
    found = faults(root, "planted_op", monkeypatch, "tests")
    assert f"ERROR tests/patterns/test_planted_op.py: {reason}" in found["tests"]
    assert f"`python -m pytest {scaffold.files_of('planted_op', root)['test']}`" in found["tests"]


def test_a_fault_in_the_benchmark_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "kernel", lambda text: text.replace("* cap, x.dtype)", "* cap + 0.1, x.dtype)"))
    found = faults(root, "planted_op", monkeypatch, "benchmark")
    assert "nothing was timed" in found["benchmark"]
    assert f"`python {scaffold.files_of('planted_op', root)['benchmark']}`" in found["benchmark"]


def test_a_benchmark_that_does_not_say_what_it_plots_is_a_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "benchmark", lambda text: text.replace("-GBps", "-speed"))
    assert "-TFLOPS" in faults(root, "planted_op", monkeypatch, "benchmark")["benchmark"]


def test_a_fault_that_only_verification_meets_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        root,
        "kernel",
        lambda text: text.replace("ct.astype(bent, ct.float32)", "ct.astype(ct.astype(bent, ct.bfloat16), ct.float32)"),
    )
    found = faults(root, "planted_op", monkeypatch, "interface", "implementation", "registration", "verification")
    assert list(found) == ["verification"]
    assert "float32" in found["verification"]


def test_what_a_fault_hides_is_blocked_and_not_left_out(root: Path) -> None:
    scaffold.files_of("planted_op", root)["kernel"].unlink()
    states = {step.title: step.state for step in steps.look("planted_op", root)}
    assert list(states) == TITLES
    assert states["implementation"] == "FAULT"
    assert states["tests"] == states["benchmark"] == states["verification"] == "blocked"


def test_nothing_is_overwritten(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["planted_op", "--op-type", "activation", "--root", str(root)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: definitions/planted_op.json exists")
    assert err.count("\n") == 1


@pytest.mark.parametrize("like", [[], ["--like", "silu_mul"]], ids=["nothing", "like"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rms_norm", "there is a Definition 'rms_norm' already"),
        ("class", "Python has that word"),
        ("register", "tilegym_fx.ops.register is something else"),
        ("name", "torch.ops.tilegym_fx.name is something else"),
        ("launch", "'launch' is something else in the kernel's file"),
        ("ct", "'ct' is something else in the kernel's file"),
    ],
)
def test_a_name_that_is_taken_is_refused_before_anything_is_written(
    name: str, message: str, like: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name, "--op-type", "activation", "--root", str(tmp_path), *like]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_another_kernels_solution_is_taken_too(root: Path) -> None:
    files = scaffold.files_of("planted_op", root)
    record = json.loads(files["solution"].read_text())
    files["solution"].with_name("second_op.json").write_text(json.dumps({**record, "name": "planted_op_in_rows"}))
    with pytest.raises(UsageError, match="there is a Solution 'planted_op_in_rows' already"):
        scaffold.require_new("planted_op_in_rows", root)


@pytest.mark.parametrize("name", ["match", "classes", "launches", "print"])
def test_a_name_that_only_looks_taken_is_not_refused(name: str, tmp_path: Path) -> None:
    scaffold.require_new(name, tmp_path)
    assert scaffold.write(name, scaffold.from_nothing(name, "activation"), tmp_path).new


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Bad-Name", "--op-type", "x"], "no name for an op"),
        (["fine"], "needs NAME and --op-type"),
        (["fine", "--op-type", "x", "--like", "nobody"], "no Definition 'nobody'"),
        (["fine", "--op-type", "x", "--from-draft", "nowhere.json"], "no draft Definition"),
        (["--status", "nobody"], "no file of 'nobody'"),
        (["fine", "--op-type", "x", "--like", "rms_nrom"], "did you mean `rms_norm`"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*arguments, "--root", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_status_of_a_misspelt_name_names_the_nearest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--status", "plantde_op", "--root", str(root)]) == 1
    assert "did you mean `planted_op`" in capsys.readouterr().err


def test_a_draft_that_no_kernel_can_be_written_for_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_fx.errors import KernelError

    def refuse(definition: object, name: str) -> tuple[str, str]:
        raise KernelError("too hard")

    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(scaffold.from_nothing("draft", "draft").definition))
    parts = scaffold.from_draft("hard_op", "activation", draft, refuse)
    scaffold.write("hard_op", parts, tmp_path / "root")
    found = faults(tmp_path / "root", "hard_op", monkeypatch, "implementation")
    assert "is not written" in found["implementation"]
