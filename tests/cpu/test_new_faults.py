"""``new --status``: a planted fault is a FAULT at the step that has to mend it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_fx.new import scaffold, steps

NAME = "placed_op"
Edit = tuple[str, str, str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a scaffold of its own name, as ops are known by name in the whole process."""
    root = tmp_path / "kernels_of_mine"
    root.mkdir()
    scaffold.write(NAME, scaffold.from_nothing(NAME, "activation"), root)
    return root


@pytest.fixture
def look(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, steps.Step]]:
    """The steps after some edits of files, without compiling a kernel or starting a process."""
    monkeypatch.setattr(steps, "run_all", lambda *_: [])
    monkeypatch.setattr(steps, "compile_faults", lambda *_: [])

    def look(*edits: Edit, titles: tuple[str, ...] = ()) -> dict[str, steps.Step]:
        for kind, before, after in edits:
            file = scaffold.files_of(NAME, root)[kind]
            assert before in file.read_text()
            file.write_text(file.read_text().replace(before, after))
        if titles:
            monkeypatch.setattr(steps, "_STEPS", tuple(s for s in steps._STEPS if s[0] in titles))
        return {step.title: step for step in steps.look(NAME, root)}

    return look


INTERFACE: dict[str, list[Edit]] = {
    "axis": [("definition", '"N": {', '"M": {')],
    "parameter": [("definition", '"cap": {', '"bound": {')],
    "no Python": [("definition", "def run(x, cap):", "def run(x, cap:")],
    "no JSON": [("definition", '"axes"', "axes")],
    "name": [("definition", f'"name": "{NAME}"', '"name": "other_op"')],
    "taken": [("definition", f'"name": "{NAME}"', '"name": "rms_norm"')],
    "sizes": [("definition", '"constraints": []', '"constraints": ["N == 2 * H", "H == 3 * N"]')],
    "patterns": [("patterns", "from __future__", "from from __future__")],
}
IMPLEMENTATION: dict[str, list[Edit]] = {
    "no Python": [("kernel", "out = torch.empty_like(x)", "out = = torch.empty_like(x)")],
    "parameter": [("kernel", f"def {NAME}(x: torch.Tensor, cap: float)", f"def {NAME}(x: torch.Tensor, bound: float)")],
}
REGISTRATION: dict[str, list[Edit]] = {
    "no such function": [("solution", f".py::{NAME}", f".py::{NAME}p")],
    "a helper": [("solution", f".py::{NAME}", ".py::capped")],
    "the kernel itself": [("solution", f".py::{NAME}", f".py::{NAME}_kernel")],
    "no such file": [("solution", f"kernels/{NAME}.py", "kernels/elsewhere.py")],
    "another Definition": [("solution", f'"definition": "{NAME}"', '"definition": "rms_norm"')],
    "no Definition": [("solution", f'"definition": "{NAME}"', '"definition": "nobody"')],
    "no JSON": [("solution", '"spec"', "spec")],
}


@pytest.mark.parametrize(
    ("title", "edits"),
    [
        pytest.param(title, edits, id=f"{title}: {kind}")
        for title, cases in (
            ("interface", INTERFACE),
            ("implementation", IMPLEMENTATION),
            ("registration", REGISTRATION),
        )
        for kind, edits in cases.items()
    ],
)
def test_a_fault_is_told_at_its_own_step_and_blocks_the_others(
    title: str, edits: list[Edit], look: Callable[..., dict[str, steps.Step]]
) -> None:
    found = look(*edits)
    assert [step.title for step in found.values() if step.state == "FAULT"] == [title]
    others = [step for step in found.values() if step.title != title]
    assert {step.text for step in others if step.state == "blocked"} == {f"not looked at: {title} has a fault"}
    assert [step.title for step in others if step.state == "ok"] == ([] if title == "interface" else ["interface"])


@pytest.mark.parametrize("hardware", ["SM99", "SM1200"])
def test_an_architecture_that_nobody_knows_is_a_fault_of_the_registration(
    hardware: str, look: Callable[..., dict[str, steps.Step]]
) -> None:
    found = look(("solution", '"SM120"', f'"{hardware}"'))
    states = {title: step.state for title, step in found.items()}
    assert (states["interface"], states["implementation"], states["registration"]) == ("ok", "ok", "FAULT")
    assert f"{hardware!r} is no architecture" in found["registration"].text
    assert "SM120" in found["registration"].text


def test_a_fault_elsewhere_in_the_root_is_not_taken_for_one_of_the_interface(
    root: Path, look: Callable[..., dict[str, steps.Step]]
) -> None:
    (root / "definitions" / "broken.json").write_text("{")
    found = look(titles=("interface", "implementation", "registration"))
    assert [step.state for step in found.values()] == ["ok", "ok", "FAULT"]
    assert "broken.json" in found["registration"].text


def test_a_kernel_that_overwrites_its_input_is_a_fault_of_the_registration(
    look: Callable[..., dict[str, steps.Step]],
) -> None:
    found = look(("kernel", "out = torch.empty_like(x)", "out = x"), titles=("implementation", "registration"))
    assert [step.state for step in found.values()] == ["ok", "FAULT"]
    assert found["registration"].text == f"kernels/{NAME}.py::{NAME}: it writes to its input 'x'"


def test_a_benchmark_at_sizes_of_an_axis_that_is_not_there_is_a_fault(
    look: Callable[..., dict[str, steps.Step]],
) -> None:
    found = look(("benchmark", '"H": 320', '"W": 320'), titles=("benchmark",))
    assert found["benchmark"].state == "FAULT"
    assert "'W'" in found["benchmark"].text
    assert "Its axes are N, H" in found["benchmark"].text
