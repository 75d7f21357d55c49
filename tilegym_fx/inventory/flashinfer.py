"""Writing an inventory as a FlashInfer-Trace data set.

The sources are embedded, and ``language`` is ``python``, because FlashInfer-Bench's list of languages has no
cuda-tile; what the files need (tilegym_fx, cuda-tile) is in ``dependencies``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilegym_fx.errors import Fault, InventoryError, UsageError, make_folder, writing
from tilegym_fx.inventory.read import faults_of
from tilegym_fx.inventory.store import Inventory
from tilegym_fx.schema import Definition, Problem, Solution

_MISSING_DTYPES = frozenset({"float64", "uint8"})
#: The format has no number of this kind at all, so that nothing else can be declared: such Definitions are left out.
_NO_NUMBERS = frozenset({"complex64"})


def export_flashinfer(inventory: Inventory, folder: Path) -> list[Path]:
    """Writes ``definitions/<op_type>/<name>.json`` and ``solutions/<op_type>/<definition>/<name>.json``.

    Definitions of complex numbers are left out: FlashInfer-Bench has none.

    Args:
        inventory: What to write.
        folder: A new or empty folder.

    Returns:
        The files written.

    Raises:
        UsageError: The folder is not empty, or cannot be written.
        InventoryError: A record has something that FlashInfer-Bench cannot express.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{str(folder)!r} is not an empty folder", advice="Name a new folder to export into")
    faults = [fault for definition in inventory.definitions.values() for fault in _dtype_faults(inventory, definition)]
    if faults:
        raise InventoryError.of(faults)
    written = []
    for path, data in _records(inventory):
        file = folder / path
        make_folder(file.parent)
        with writing(file):
            file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(file)
    return written


def inexpressible(definition: Definition) -> bool:
    """Whether a Definition has no counterpart in the format, whatever it declared."""
    return any(spec.dtype in _NO_NUMBERS for spec in (*definition.inputs.values(), *definition.outputs.values()))


def _records(inventory: Inventory) -> Iterator[tuple[Path, dict[str, Any]]]:
    for definition in inventory.definitions.values():
        if inexpressible(definition):
            continue
        yield Path("definitions", definition.op_type, f"{definition.name}.json"), _definition_data(definition)
        for solution in inventory.solutions_for(definition.name):
            path = Path("solutions", definition.op_type, definition.name, f"{solution.name}.json")
            yield path, _solution_data(inventory, solution)


def _definition_data(definition: Definition) -> dict[str, Any]:
    data = definition.model_dump(mode="json", exclude_none=True)
    for group in ("inputs", "outputs"):
        for name, spec in getattr(definition, group).items():
            data[group][name]["shape"] = None if spec.is_scalar else list(spec.shape)
            del data[group][name]["inplace_output"]
    return data


def _solution_data(inventory: Inventory, solution: Solution) -> dict[str, Any]:
    spec = solution.spec.model_dump(mode="json", exclude_none=True)
    if solution.spec.language == "cuda-tile":
        spec["language"] = "python"
        spec["dependencies"] = list(dict.fromkeys((*solution.spec.dependencies, "cuda-tile", "tilegym_fx")))
        spec["destination_passing_style"] = bool(solution.spec.destination_passing_style)
    return {
        "name": solution.name,
        "definition": solution.definition,
        "author": solution.author,
        "description": solution.description or solution.name,
        "spec": spec,
        "sources": [{"path": path, "content": text} for path, text in inventory.source_texts(solution.name).items()],
    }


def _dtype_faults(inventory: Inventory, definition: Definition) -> list[Fault]:
    problems = [
        Problem(f"{group}.{name}.dtype", f"FlashInfer-Bench has no {spec.dtype}", "declare another dtype")
        for group, specs in (("inputs", definition.inputs), ("outputs", definition.outputs))
        for name, spec in specs.items()
        if spec.dtype in _MISSING_DTYPES
    ]
    return faults_of(inventory.file_of(definition), problems)
