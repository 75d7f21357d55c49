"""Where emitted text goes: one file, or the folder form that TileGym keeps for each model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from .apply import save
from .emit import EmitResult
from .errors import make_folder

if TYPE_CHECKING:
    from .inventory import Inventory


def submodule_name(model: nn.Module) -> str:
    """``llama``: the model type as a Python name, or the class's name in lower case."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__.lower()
    return str(kind).replace("-", "_")


def emitted_path(place: str | Path, model: nn.Module) -> Path:
    """``modeling_<model type>.py`` in a folder, or the file itself where the name ends in .py."""
    path = Path(place)
    return path if path.suffix == ".py" else path / f"modeling_{submodule_name(model)}.py"


def make_emitted_folder(place: str | Path) -> None:
    """Makes the folder that :func:`emitted_path` names a file in.

    Raises:
        UsageError: There can be no such folder, or nothing may be written in it.
    """
    path = Path(place)
    make_folder(path.parent if path.suffix == ".py" else path)


def write_folder(made: EmitResult, model: nn.Module, inventory: Inventory, place: Path) -> Path:
    """Write ``<submodule>/`` with the modeling file and the Definitions, Solutions and kernels that it uses.

    Args:
        made: The emitted text and what is in it.
        model: The model that it was made from.
        inventory: Where the Definitions come from.
        place: The folder that gets the ``<submodule>`` folder.

    Returns:
        The modeling file.
    """
    folder = place / submodule_name(model)
    for name in ("kernel_definitions", "kernel_solutions", "kernels"):
        make_folder(folder / name)
    for name in sorted({w.match.definition for w in made.written}):
        _copy(inventory.file_of(inventory.definitions[name]), folder / "kernel_definitions")
        for solution in inventory.solutions_for(name)[:1]:
            file = inventory.file_of(solution)
            _copy(file, folder / "kernel_solutions")
            for source in solution.sources:
                _copy(inventory.root_of(name).path / source.path, folder / "kernels")
    path = folder / f"modeling_{submodule_name(model)}.py"
    save(made.text, path)
    return path


def _copy(file: Path, folder: Path) -> None:
    shutil.copyfile(file, folder / file.name)
