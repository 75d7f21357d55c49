"""Where the files of an inventory are: three folder forms, each with its rules, told apart by folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilegym_fx.errors import InventoryError
from tilegym_fx.inventory import rules


@dataclass(frozen=True)
class Layout:
    """One folder form.

    Attributes:
        name: What messages call it.
        definitions: Root folder -> the Definition files below it.
        solutions: Root folder -> the Solution files below it.
        candidates: (root, Solution file, source path) -> where that source may be, likeliest first.
        rules: What is checked beyond the schema.
    """

    name: str
    definitions: Callable[[Path], Iterator[Path]]
    solutions: Callable[[Path], Iterator[Path]]
    candidates: Callable[[Path, Path, str], Iterator[Path]]
    rules: rules.Rules


@dataclass(frozen=True)
class Root:
    """A folder (its absolute path) that holds an inventory, and the form that it has."""

    path: Path
    layout: Layout

    def definition_files(self) -> list[Path]:
        """Every Definition file, sorted."""
        return sorted(self.layout.definitions(self.path))

    def solution_files(self) -> list[Path]:
        """Every Solution file, sorted."""
        return sorted(self.layout.solutions(self.path))

    def pattern_files(self) -> list[Path]:
        """Every file of spellings, sorted; only the repository form has any."""
        return sorted(filter(Path.is_file, self.path.glob("patterns/*.py"))) if self.layout is REPOSITORY else []

    def pattern_file(self, name: str) -> Path | None:
        """The file of spellings of one Definition, if there is one."""
        file = self.path / "patterns" / f"{name}.py"
        return file if self.layout is REPOSITORY and file.is_file() else None

    def find(self, solution_file: Path, source: str) -> Path | None:
        """The file that a Solution's source path means, if it exists inside this root."""
        candidates = self.layout.candidates(self.path, solution_file, source)
        return next((file for file in candidates if file.is_relative_to(self.path) and file.is_file()), None)


def _below(folder: str, pattern: str) -> Callable[[Path], Iterator[Path]]:
    return lambda root: (root / folder).rglob(pattern)


def _in_pairs(own: str, sibling: str) -> Callable[[Path], Iterator[Path]]:
    def files(root: Path) -> Iterator[Path]:
        for folder in root.rglob(own):
            if folder.is_dir() and (folder.parent / sibling).is_dir():
                yield from folder.rglob("*.json")

    return files


def _below_root(root: Path, _: Path, source: str) -> Iterator[Path]:
    yield root / source


def _checkout_or_wheel(_: Path, solution_file: Path, source: str) -> Iterator[Path]:
    """TileGym's paths start at its checkout (``src/tilegym/...``); in its wheel ``src/`` is gone."""
    for folder in solution_file.parents:
        yield folder / source
        yield folder / source.removeprefix("src/")


#: Ours: flat folders definitions/, solutions/, kernels/, patterns/.
REPOSITORY = Layout(
    name="repository",
    definitions=_below("definitions", "*.json"),
    solutions=_below("solutions", "*.json"),
    candidates=_below_root,
    rules=rules.REPOSITORY,
)
#: A FlashInfer-Trace data set: definitions/<op_type>/*.json, solutions/**/*.json with embedded sources.
FLASHINFER_TRACE = Layout(
    name="FlashInfer-Trace",
    definitions=_below("definitions", "*.json"),
    solutions=_below("solutions", "*.json"),
    candidates=_below_root,
    rules=rules.FLASHINFER_TRACE,
)
#: TileGym's package: pairs of kernel_definitions/ and kernel_solutions/ anywhere below the root.
TILEGYM = Layout(
    name="TileGym",
    definitions=_in_pairs("kernel_definitions", "kernel_solutions"),
    solutions=_in_pairs("kernel_solutions", "kernel_definitions"),
    candidates=_checkout_or_wheel,
    rules=rules.TILEGYM,
)


def detect(path: Path) -> Root:
    """Tells which form the inventory below ``path`` has.

    Raises:
        InventoryError: It is no folder, or holds none of the three forms.
    """
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        raise InventoryError(f"{str(path)!r} is not a folder", advice="Name the folder that holds the inventory")
    if (path / "definitions").is_dir() or (path / "solutions").is_dir():
        return Root(path, REPOSITORY if _is_flat(path) else FLASHINFER_TRACE)
    if next(TILEGYM.definitions(path), None) is not None:
        return Root(path, TILEGYM)
    raise InventoryError(
        f"{str(path)!r} holds no inventory",
        advice="It needs definitions/ and solutions/, or kernel_definitions/ beside kernel_solutions/",
    )


def shipped_root() -> Path:
    """The folder that holds our definitions/, patterns/, solutions/ and kernels/."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def _is_flat(path: Path) -> bool:
    """Ours unless every JSON lies in a sub-folder; kernels/ or patterns/ beside it settles the matter."""
    folders = (path / "definitions", path / "solutions")
    if any((path / name).is_dir() for name in ("kernels", "patterns")) or any(any(f.glob("*.json")) for f in folders):
        return True
    return not any(any(folder.rglob("*.json")) for folder in folders)
