"""Where emitted text goes: one file, or the folder form that TileGym keeps for each model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from .apply import save
from .errors import UsageError, make_folder, writing
from .results import WRITTEN_BY, EmitResult

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


def modeling_file(place: Path, model: nn.Module) -> Path:
    """The modeling file of the folder form."""
    name = submodule_name(model)
    return place / name / f"modeling_{name}.py"


def refuse_foreign(path: Path) -> None:
    """Only an empty file or an emitted one is written over.

    Raises:
        UsageError: The file has something else in it, or cannot be read.
    """
    if not path.is_file():
        return
    with writing(path):
        text = path.read_bytes()
    first = text.split(b"\n", 1)[0].strip()
    if text.strip() and not (first.startswith(b'"""') and first.endswith(WRITTEN_BY.encode())):
        problem = f"{str(path)!r} was not written by tilegym_fx and is not written over"
        raise UsageError(problem, advice="Name another place, or move the file away")


def make_emitted_folder(place: str | Path) -> None:
    """Makes the folder that :func:`emitted_path` names a file in.

    Raises:
        UsageError: There can be no such folder, nothing may be written in it, or the file is somebody else's.
    """
    path = Path(place)
    if path.suffix == ".py":
        refuse_foreign(path)
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

    Raises:
        UsageError: There is one that we did not write.
    """
    path = modeling_file(place, model)
    refuse_foreign(path)
    folder = path.parent
    for name in ("kernel_definitions", "kernel_solutions", "kernels"):
        make_folder(folder / name)
    for name in sorted({w.match.definition for w in made.written}):
        _copy(inventory.file_of(inventory.definitions[name]), folder / "kernel_definitions")
        for solution in inventory.solutions_for(name)[:1]:
            file = inventory.file_of(solution)
            _copy(file, folder / "kernel_solutions")
            for source in solution.sources:
                _copy(inventory.root_of(name).path / source.path, folder / "kernels")
    save(made.text, path)
    return path


def _copy(file: Path, folder: Path) -> None:
    shutil.copyfile(file, folder / file.name)
