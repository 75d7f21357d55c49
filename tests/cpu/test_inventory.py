"""Loading inventories: records by name, references, spellings and kernels as functions."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from inventory_roots import definition, solution, write_json, write_repository

from tilegym_fx.errors import InventoryError, KernelError, SettingsError, UnknownNameError
from tilegym_fx.inventory import load, shipped_root, store
from tilegym_fx.inventory.layout import Root

PATTERN = '''"""A pattern."""
from tilegym_fx.spelling import guard, spelling

@spelling(source="https://github.com/org/repo/blob/v1.2.3/src/model.py#L1")
def scale_first(x, scale):
    return scale * x

@guard
def never(x, scale):
    return "never"
'''


def test_the_shipped_inventory_is_read_once() -> None:
    inventory = load()
    assert load() is inventory
    assert {
        "rms_norm",
        "silu_mul",
        "rotary_embedding",
        "gqa_attention",
        "linear",
    } <= inventory.definitions.keys()
    assert (shipped_root() / "definitions").is_dir()


def test_a_record_that_is_added_changed_or_removed_is_seen_by_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_repository(tmp_path)
    monkeypatch.setattr(store, "shipped_root", lambda: root)
    before = load()
    write_json(root / "definitions" / "alone.json", definition("alone"))
    added = load()
    assert "alone" not in before.definitions
    assert "alone" in added.definitions
    (root / "README.md").write_text("no record")
    assert load() is added
    write_json(root / "definitions" / "alone.json", {**definition("alone"), "description": "another"})
    assert load().definitions["alone"].description == "another"
    (root / "definitions" / "alone.json").unlink()
    assert "alone" not in load().definitions


def test_a_reference_runs_and_its_source_can_be_looked_at(tmp_path: Path) -> None:
    inventory = load(write_repository(tmp_path), shipped=False)
    run = inventory.reference("scaled")
    assert torch.equal(run(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert inventory.reference("scaled") is run
    assert "return x * scale" in inspect.getsource(run)


def test_solutions_are_found_by_definition(tmp_path: Path) -> None:
    root = write_repository(tmp_path, definition("alone"))
    write_json(root / "solutions" / "scaled_b.json", solution("scaled_b"))
    inventory = load(root, shipped=False)
    assert [record.name for record in inventory.solutions_for("scaled")] == ["scaled", "scaled_b"]
    assert inventory.solutions_for("alone") == ()
    assert inventory.file_of(inventory.solutions["scaled_b"]) == root / "solutions" / "scaled_b.json"


def test_an_entry_point_is_loaded_under_a_private_name_with_its_neighbours(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    (root / "kernels" / "scaled.py").write_text("from .shared import double as scaled\n")
    (root / "kernels" / "shared.py").write_text("def double(x, scale):\n    return 2 * x\n")
    (root / "kernels" / "__init__.py").write_text("raise SystemExit('imported as a package')\n")
    inventory = load(root, shipped=False)
    function = inventory.entry_point("scaled")
    assert function(4, 0) == 8
    assert function.__module__.startswith("tilegym_fx_data_")
    assert inventory.entry_point("scaled") is function
    assert "kernels.scaled" not in sys.modules


def test_kernels_of_one_name_in_two_roots_do_not_mix(tmp_path: Path) -> None:
    roots = [write_repository(tmp_path / name) for name in "ab"]
    (roots[1] / "kernels" / "scaled.py").write_text("def scaled(x, scale):\n    return 'second'\n")
    functions = [load(root, shipped=False).entry_point("scaled") for root in roots]
    assert functions[0](2, 3) == 6
    assert functions[1](2, 3) == "second"


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import no_such_package\n", KernelError, "No module named 'no_such_package'"),
        ("def scaled(:\n", InventoryError, "scaled.py, line 1: no valid Python"),
        ("other = 1\n", InventoryError, "has no 'scaled'"),
        ("scaled = 1\n", InventoryError, "has no 'scaled'"),
        (None, InventoryError, "'kernels/scaled.py' does not exist"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_says_why(
    tmp_path: Path, code: str | None, kind: type[Exception], message: str
) -> None:
    root = write_repository(tmp_path)
    file = root / "kernels" / "scaled.py"
    file.unlink() if code is None else file.write_text(code)
    with pytest.raises(kind, match=message):
        load(root, shipped=False).entry_point("scaled")


@pytest.mark.parametrize("absent", ["cuda", "cuda.tile"])
def test_a_kernel_without_cutile_advises_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    """The interpreter needs it as well, so that to ask for the interpreter would be no way out."""
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "cuda.tile", raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    root = write_repository(tmp_path)
    (root / "kernels" / "scaled.py").write_text("import cuda.tile as ct\n")
    with pytest.raises(KernelError) as refused:
        load(root, shipped=False).entry_point("scaled")
    assert 'Install cuTile: `pip install "cuda-tile[tileiras]"`' in str(refused.value)
    assert "TILEGYM_FX_INTERPRET" not in str(refused.value)


def test_spellings_and_guards_come_from_the_patterns_folder(tmp_path: Path) -> None:
    root = write_repository(tmp_path, definition("alone"))
    write_json(root / "patterns" / "scaled.py", PATTERN)
    inventory = load(root, shipped=False)
    spelling = inventory.spellings("scaled")["scale_first"]
    assert spelling.function(2, 3) == 6
    assert [guard(1, 1) for guard in inventory.guards("scaled")] == ["never"]
    assert inventory.spellings("alone") == {}

    assert inventory.guards("alone") == ()


def test_the_code_of_one_definition_is_found_without_a_list_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Definition is asked for three things before the first match in a process."""
    root = write_repository(tmp_path, definition("alone"))
    write_json(root / "patterns" / "scaled.py", PATTERN)
    inventory = load(root, shipped=False)
    monkeypatch.delattr(Root, "pattern_files")
    assert inventory.spellings("scaled")
    assert inventory.shapes("alone") == {}


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    inventory = load(write_repository(tmp_path), shipped=False)
    for ask in (inventory.definition, inventory.reference, inventory.spellings, inventory.entry_point):
        with pytest.raises(UnknownNameError, match="'nothing'"):
            ask("nothing")


def test_a_reference_that_imports_what_is_not_there_says_so(tmp_path: Path) -> None:
    text = "import no_such_package\n\n\ndef run(x, scale):\n    return x\n"
    inventory = load(write_repository(tmp_path, definition("bad", reference=text)), shipped=False)
    with pytest.raises(InventoryError, match="the reference of 'bad' cannot be executed: No module named"):
        inventory.reference("bad")


def test_one_name_in_two_roots_is_an_error(tmp_path: Path) -> None:
    roots = [write_repository(tmp_path / name) for name in "ab"]
    with pytest.raises(InventoryError) as caught:
        load(*roots, shipped=False)
    assert [fault.field for fault in caught.value.faults] == ["name", "name"]
    assert "is taken by" in str(caught.value)


def test_one_root_named_twice_is_read_once(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    assert list(load(root, str(root), shipped=False).definitions) == ["scaled"]


def test_roots_of_the_environment_are_read_beside_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILEGYM_FX_INVENTORY", str(write_repository(tmp_path)))
    assert {"scaled", "rms_norm"} <= load().definitions.keys()
    assert "scaled" not in load(shipped_root(), shipped=False).definitions
    monkeypatch.setenv("TILEGYM_FX_INVENTORY", str(tmp_path / "absent"))
    with pytest.raises(SettingsError):
        load()


def test_a_root_without_an_inventory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (
        ("file", "is not a folder"),
        ("absent", "is not a folder"),
        ("", "holds no inventory"),
    ):
        with pytest.raises(InventoryError, match=message):
            load(tmp_path / name, shipped=False)


def test_the_digest_changes_with_any_file(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    digests = {load(root, shipped=False).digest}
    for file in ("kernels/scaled.py", "definitions/scaled.json", "solutions/scaled.json"):
        (root / file).write_text((root / file).read_text() + "\n")
        digests.add(load(root, shipped=False).digest)
    write_json(root / "patterns" / "scaled.py", PATTERN)
    digests.add(load(root, shipped=False).digest)
    assert len(digests) == 5
