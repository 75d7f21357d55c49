"""Inventories of others, read as they are: TileGym's published wheel, and FlashInfer-Trace data sets."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import linecache
from pathlib import Path

import pytest
from inventory_roots import write_flashinfer_trace, write_json

from tilegym_fx.errors import InventoryError, KernelError
from tilegym_fx.inventory import load
from tilegym_fx.inventory.check import check

READS_VALUES = "the constraint `pages == indptr[-1].item()` reads tensor values"


@pytest.fixture(scope="module")
def tilegym() -> Path:
    """The folder of the installed package, which is never imported."""
    spec = importlib.util.find_spec("tilegym")
    assert spec, "tests/packages.txt names tilegym"
    assert spec.origin
    return Path(spec.origin).parent


def test_every_pair_of_the_tilegym_wheel_is_read_and_without_fault(tilegym: Path) -> None:
    result = check([tilegym])
    assert (result.definitions, result.solutions) == (13, 13)
    assert result.faults == []
    assert result.notes == [], "every reference was run"


def test_tilegym_is_an_extra_root_beside_ours(tilegym: Path) -> None:
    inventory = load(tilegym)
    assert {"rms_norm", "olmo3_rms_norm_residual_add"} <= inventory.definitions.keys()
    record = inventory.definitions["olmo3_rms_norm_residual_add"]
    assert list(record.inputs) == ["x", "residual", "weight", "eps"], "in the order of run, not of the JSON"
    [solution] = inventory.solutions_for(record.name)
    [text] = inventory.source_texts(solution.name).values()
    assert f"def {solution.entry_function}(" in text


def test_the_folder_above_tilegym_is_as_good(tilegym: Path) -> None:
    packages = load(tilegym.parent, shipped=False)
    assert len(packages.solutions) == 13
    assert packages.source_texts("olmo3_dual_rms_norm_cutile")


def test_a_flashinfer_trace_is_read_unchanged(tmp_path: Path) -> None:
    root = write_flashinfer_trace(tmp_path)
    inventory = load(root, shipped=False)
    assert inventory.definitions.keys() == {"norm_h8", "paged_ps2"}
    assert {s.spec.language for s in inventory.solutions_for("norm_h8")} == {"triton", "cuda"}
    result = check([root])
    assert result.faults == []
    [note] = result.notes
    assert note == f"paged_ps2: the reference was not run: {READS_VALUES}"


def test_embedded_python_is_loaded_and_other_languages_are_refused(tmp_path: Path) -> None:
    root = write_flashinfer_trace(tmp_path)
    file = next(root.rglob("norm_h8_triton.json"))
    file.write_text(file.read_text().replace("import helper", "helper = 1"))
    inventory = load(root, shipped=False)
    assert inventory.entry_point("norm_h8_triton")(1, 2, 3) is None
    with pytest.raises(KernelError, match="is in cuda, which cannot be loaded here"):
        inventory.entry_point("norm_h8_cuda")


def test_embedded_python_outlives_its_inventory(tmp_path: Path) -> None:
    """A kernel's file is read when it is first launched: functions that are kept must keep theirs."""
    root = write_flashinfer_trace(tmp_path)
    file = next(root.rglob("norm_h8_triton.json"))
    file.write_text(file.read_text().replace("import helper", "helper = 2"))
    kept = load(root, shipped=False).entry_point("norm_h8_triton")
    gc.collect()
    linecache.clearcache()
    assert inspect.getsource(kept) == "def run(hidden_states, weight, output):\n    pass\n"
    file.write_text(file.read_text().replace("helper = 2", "helper = 3"))
    other = load(root, shipped=False).entry_point("norm_h8_triton")
    assert (kept.__globals__["helper"], other.__globals__["helper"]) == (2, 3)


def test_faults_of_a_flashinfer_trace_are_found(tmp_path: Path) -> None:
    root = write_flashinfer_trace(tmp_path)
    file = next(root.rglob("norm_h8_triton.json"))
    file.write_text(file.read_text().replace("def run", "def walk"))
    write_json(
        root / "solutions" / "a" / "b.json",
        file.read_text().replace("norm_h8", "gone").replace("content", "c"),
    )
    norm = next(root.rglob("norm_h8.json"))
    norm.write_text(norm.read_text().replace("hidden_states * weight", "weight"))
    found = {(Path(fault.file).stem, fault.field) for fault in check([root]).faults}
    assert found == {
        ("norm_h8_triton", "spec.entry_point"),
        ("b", "definition"),
        ("b", "sources.0.content"),
        ("norm_h8", "reference"),
    }


def test_a_flashinfer_reference_on_made_up_indices_is_a_note_when_it_raises(tmp_path: Path) -> None:
    root = write_flashinfer_trace(tmp_path)
    paged = next(root.rglob("paged_ps2.json"))
    paged.write_text(paged.read_text().replace("pages == indptr[-1].item()", "pages > 1"))
    result = check([root])
    assert result.faults == []
    assert result.notes == ["paged_ps2: the reference, run on made-up indices, raises RuntimeError: offsets"]


def test_a_flat_root_is_held_to_the_rules_of_ours(tmp_path: Path) -> None:
    root = write_flashinfer_trace(tmp_path)
    norm = next(root.rglob("norm_h8.json"))
    norm.rename(root / "definitions" / "norm_h8.json")
    faults = check([root], execute=False).faults
    assert any("does not begin with `# Source:`" in fault.problem for fault in faults)
    with pytest.raises(InventoryError, match="is no key of the schema"):
        load(root, shipped=False)
