"""The Inventory that the other stages use: records by name, and the code that belongs to them."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from tilegym_fx import settings
from tilegym_fx.errors import InventoryError, KernelError, UnknownNameError, did_you_mean
from tilegym_fx.inventory.code import load_file, reference_function
from tilegym_fx.inventory.collect import Collection, Entry, RecordT, collect
from tilegym_fx.inventory.layout import Root, detect, shipped_root
from tilegym_fx.inventory.read import shown
from tilegym_fx.schema import Definition, Solution

if TYPE_CHECKING:
    from tilegym_fx.spelling import Guard, Spelling

_PYTHON_LANGUAGES = frozenset({"cuda-tile", "python", "triton", "tilelang"})


class Inventory:
    """Definitions and Solutions by name, and the code that belongs to them, loaded when asked for."""

    def __init__(self, collection: Collection) -> None:
        self._entries = collection
        self._references: dict[str, Callable[..., Any]] = {}
        self._entry_points: dict[str, Callable[..., Any]] = {}
        self.roots = collection.roots
        self.definitions: Mapping[str, Definition] = MappingProxyType(
            {name: entry.record for name, entry in collection.definitions.items()}
        )
        self.solutions: Mapping[str, Solution] = MappingProxyType(
            {name: entry.record for name, entry in collection.solutions.items()}
        )

    def definition(self, name: str) -> Definition:
        """The Definition of that name.

        Raises:
            UnknownNameError: There is none.
        """
        return _get(self._entries.definitions, name, "Definition").record

    def solutions_for(self, name: str) -> tuple[Solution, ...]:
        """The Solutions of a Definition, by name; empty when nobody has written one."""
        return tuple(solution for _, solution in sorted(self.solutions.items()) if solution.definition == name)

    def root_of(self, name: str) -> Root:
        """The root that a Definition was read from."""
        return _get(self._entries.definitions, name, "Definition").root

    def file_of(self, record: Definition | Solution) -> Path:
        """The JSON file that a record was read from."""
        if isinstance(record, Definition):
            return _get(self._entries.definitions, record.name, "Definition").file
        return _get(self._entries.solutions, record.name, "Solution").file

    def reference(self, name: str) -> Callable[..., Any]:
        """``run`` of a Definition's reference, executed once.

        Raises:
            UnknownNameError: There is no such Definition.
            InventoryError: The reference cannot be executed.
        """
        if name not in self._references:
            self._references[name] = reference_function(name, self.definition(name).reference)
        return self._references[name]

    def spellings(self, name: str) -> Mapping[str, Spelling]:
        """The spellings in ``patterns/<name>.py`` by function name; empty without that file."""
        from tilegym_fx.spelling import spellings_in

        module = self._pattern_module(name)
        return spellings_in(module) if module else {}

    def guards(self, name: str, spelling: str = "reference") -> tuple[Guard, ...]:
        """The guards in ``patterns/<name>.py`` that apply to a spelling."""
        from tilegym_fx.spelling import guards_in

        module = self._pattern_module(name)
        return guards_in(module, spelling) if module else ()

    def shapes(self, name: str) -> Mapping[str, tuple[str, ...] | None]:
        """What ``SHAPES`` in ``patterns/<name>.py`` has in the place of declared shapes; see `tilegym_fx.axes`."""
        from tilegym_fx.spelling import shapes_in

        module = self._pattern_module(name)
        return shapes_in(module) if module else {}

    def entry_point(self, solution_name: str) -> Callable[..., Any]:
        """The function that a Solution's entry point names. Imports its file, and so cuda.tile, once.

        Raises:
            UnknownNameError: There is no such Solution.
            KernelError: It is not written in Python, or needs a package that is not installed.
            InventoryError: The file or the function does not exist.
        """
        if solution_name not in self._entry_points:
            self._entry_points[solution_name] = self._load_entry_point(solution_name)
        return self._entry_points[solution_name]

    def _load_entry_point(self, solution_name: str) -> Callable[..., Any]:
        entry = _get(self._entries.solutions, solution_name, "Solution")
        solution = entry.record
        if solution.spec.language not in _PYTHON_LANGUAGES:
            raise KernelError(
                f"Solution {solution_name!r} is in {solution.spec.language}, which cannot be loaded here",
                advice="Use a Solution in Python, Triton or cuTile",
            )
        folder, file = self._entry_file(entry)
        function = getattr(load_file(folder, file), solution.entry_function, None)
        if not callable(function):
            raise InventoryError(f"Solution {solution_name!r}: {shown(file)} has no {solution.entry_function!r}")
        result: Callable[..., Any] = function
        return result

    def source_texts(self, solution_name: str) -> dict[str, str]:
        """Path -> text of every source of a Solution.

        Raises:
            UnknownNameError: There is no such Solution.
            InventoryError: A source does not exist or is no UTF-8 text.
        """
        entry = _get(self._entries.solutions, solution_name, "Solution")
        return {source.path: source.content or _text(entry, source.path) for source in entry.record.sources}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over every JSON, pattern and kernel file: changes whenever the inventory does."""
        digest = hashlib.sha256()
        for file in sorted(set(self._files())):
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def _files(self) -> Iterable[Path]:
        for root in self.roots:
            yield from (*root.definition_files(), *root.solution_files(), *root.pattern_files())
            yield from filter(Path.is_file, (root.path / "kernels").rglob("*.py"))
        for entry in self._entries.solutions.values():
            found = (entry.root.find(entry.file, source.path) for source in entry.record.sources)
            yield from filter(None, found)

    def _pattern_module(self, name: str) -> ModuleType | None:
        root = self.root_of(name)
        file = root.pattern_file(name)
        return load_file(root.path, file) if file is not None else None

    def _entry_file(self, entry: Entry[Solution]) -> tuple[Path, Path]:
        sources = {source.path: source.content for source in entry.record.sources}
        if sources[entry.record.entry_file] is not None:
            folder = Path(_written(tuple(sources.items())).name)
            return folder, folder / entry.record.entry_file
        return entry.root.path, _source_file(entry, entry.record.entry_file)


def load(*roots: Path | str, shipped: bool = True) -> Inventory:
    """Reads inventories.

    Args:
        *roots: Extra roots to read. They are code: name only what you trust.
        shipped: Read the inventory of this package too, and the roots in ``TILEGYM_FX_INVENTORY``. Without other
            roots it is the same object until a record is added, changed or removed.

    Raises:
        InventoryError: With every fault that makes a record unusable. House rules and what references compute
            are the business of ``python -m tilegym_fx.inventory check``.
    """
    extra = tuple(Path(root) for root in roots)
    if not shipped:
        return _load(extra)
    extra = (*settings.inventory_roots(), *extra)
    return _load((shipped_root(), *extra)) if extra else _load_shipped(_state_of(shipped_root()))


@functools.lru_cache(maxsize=1)
def _load_shipped(state: tuple[tuple[str, int, int], ...]) -> Inventory:
    """The shipped inventory, read again once its records are in another state: ``new`` writes records there."""
    return _load((shipped_root(),))


def _state_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of every record below a root."""
    root = detect(path)
    stats = [(str(file), file.stat()) for file in (*root.definition_files(), *root.solution_files())]
    return tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)


def _load(paths: Sequence[Path]) -> Inventory:
    collection = collect(paths)
    if collection.faults:
        raise InventoryError.of(collection.faults)
    return Inventory(collection)


@functools.cache
def _written(sources: tuple[tuple[str, str | None], ...]) -> tempfile.TemporaryDirectory[str]:
    """A folder with embedded sources, kept while the process lives.

    The functions in it outlive their inventory, and cuTile reads a kernel's file when it is first launched.
    """
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="tilegym_fx_")
    for path, content in sources:
        file = Path(folder.name, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content or "", encoding="utf-8")
    return folder


def _source_file(entry: Entry[Solution], source: str) -> Path:
    file = entry.root.find(entry.file, source)
    if file is None:
        raise InventoryError(f"Solution {entry.record.name!r}: the source {source!r} does not exist")
    return file


def _text(entry: Entry[Solution], source: str) -> str:
    file = _source_file(entry, source)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InventoryError(f"Solution {entry.record.name!r}: {shown(file)} cannot be read ({error})") from error


def _get(entries: Mapping[str, Entry[RecordT]], name: str, kind: str) -> Entry[RecordT]:
    if name not in entries:
        advice = f"{UnknownNameError.advice}{did_you_mean(name, entries)}"
        raise UnknownNameError(f"there is no {kind} {name!r}", advice=advice)
    return entries[name]
