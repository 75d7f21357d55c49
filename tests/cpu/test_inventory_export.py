"""`export --flashinfer`: FlashInfer-Bench's own models accept what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inventory_roots import definition, write_json, write_repository

from tilegym_fx.errors import InventoryError, UsageError
from tilegym_fx.inventory import Inventory, load, shipped_root
from tilegym_fx.inventory.flashinfer import export_flashinfer, inexpressible


@pytest.fixture(scope="module")
def ours() -> Inventory:
    return load(shipped_root(), shipped=False)


def test_flashinfer_bench_accepts_ours(ours: Inventory, tmp_path: Path) -> None:
    from flashinfer_bench.data import SupportedLanguages, TraceSet

    export_flashinfer(ours, tmp_path / "set")
    trace_set = TraceSet.from_path(str(tmp_path / "set"))
    expressible = {name: record for name, record in ours.definitions.items() if not inexpressible(record)}
    assert trace_set.definitions.keys() == expressible.keys()
    for name, record in expressible.items():
        theirs = trace_set.definitions[name]
        assert list(theirs.inputs) == list(record.inputs)
        assert theirs.reference == record.reference
        assert [s.name for s in trace_set.solutions.get(name, [])] == [s.name for s in ours.solutions_for(name)]
    for solution in (s for name in expressible for s in ours.solutions_for(name)):
        theirs = trace_set.get_solution(solution.name)
        assert theirs.spec.language is SupportedLanguages.PYTHON
        assert theirs.spec.destination_passing_style is False
        assert "tilegym_fx" in theirs.spec.dependencies
        entry = next(source for source in theirs.sources if source.path == solution.entry_file)
        assert entry.content == (shipped_root() / solution.entry_file).read_text(encoding="utf-8")


def test_what_is_exported_can_be_read_back(tmp_path: Path) -> None:
    inventory = load(write_repository(tmp_path / "root"), shipped=False)
    written = export_flashinfer(inventory, tmp_path / "set")
    assert [str(file.relative_to(tmp_path / "set")) for file in written] == [
        "definitions/activation/scaled.json",
        "solutions/activation/scaled/scaled.json",
    ]
    again = load(tmp_path / "set", shipped=False)
    assert again.definitions == inventory.definitions
    assert again.entry_point("scaled")(2, 3) == 6


def test_only_an_empty_folder_is_written_to(tmp_path: Path) -> None:
    inventory = load(write_repository(tmp_path / "root"), shipped=False)
    for folder in (tmp_path / "root", tmp_path / "root" / "kernels" / "scaled.py"):
        with pytest.raises(UsageError, match="is not an empty folder"):
            export_flashinfer(inventory, folder)
    with pytest.raises(UsageError, match="cannot be written"):
        export_flashinfer(inventory, tmp_path / "root" / "kernels" / "scaled.py" / "below")


def test_a_dtype_that_flashinfer_bench_lacks_is_a_fault(tmp_path: Path) -> None:
    wide = definition("wide", outputs={"output": {"shape": ["N", "D"], "dtype": "float64"}})
    inventory = load(write_repository(tmp_path / "root", wide), shipped=False)
    with pytest.raises(InventoryError, match=r"wide\.json: outputs\.output\.dtype: FlashInfer-Bench has no float64"):
        export_flashinfer(inventory, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_a_definition_of_complex_numbers_is_left_out(tmp_path: Path) -> None:
    """No other dtype could be declared for it; what is beside it is written."""
    phases = definition("phases", outputs={"output": {"shape": ["N", "D"], "dtype": "complex64"}})
    inventory = load(write_repository(tmp_path / "root", phases), shipped=False)
    written = {file.stem for file in export_flashinfer(inventory, tmp_path / "set")}
    assert "phases" not in written


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    root = write_repository(tmp_path / "root")
    (root / "kernels" / "scaled.py").write_bytes(b"\xff")
    with pytest.raises(InventoryError, match="cannot be read"):
        export_flashinfer(load(root, shipped=False), tmp_path / "set")


def test_a_data_set_keeps_its_own_spec(tmp_path: Path) -> None:
    root = write_repository(tmp_path / "root")
    record = json.loads((root / "solutions" / "scaled.json").read_text())
    record["spec"] |= {"language": "triton"}
    write_json(root / "solutions" / "scaled.json", record)
    [_, file] = export_flashinfer(load(root, shipped=False), tmp_path / "set")
    assert json.loads(file.read_text())["spec"] == record["spec"]
