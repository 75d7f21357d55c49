"""Reading every file of some roots, and the checks that need more than one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from tilegym_fx.errors import Fault, InventoryError
from tilegym_fx.inventory.layout import Root, detect
from tilegym_fx.inventory.read import faults_of, read, shown
from tilegym_fx.schema import Definition, Problem, Solution

RecordT = TypeVar("RecordT", Definition, Solution)


@dataclass(frozen=True)
class Entry(Generic[RecordT]):
    """A record and where it was read."""

    root: Root
    file: Path
    record: RecordT


@dataclass
class Collection:
    """Everything that was read from some roots, faults included."""

    roots: tuple[Root, ...] = ()
    definitions: dict[str, Entry[Definition]] = field(default_factory=dict)
    solutions: dict[str, Entry[Solution]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # stems of the files that could not be read


def collect(paths: Sequence[Path]) -> Collection:
    """Reads every file of some roots; what is wrong is a fault and hides nothing else."""
    collection = Collection(roots=tuple(dict.fromkeys(detect(path) for path in paths)))
    for root in collection.roots:
        for file in root.definition_files():
            _read_into(collection, collection.definitions, root, file, Definition)
        for file in root.solution_files():
            _read_into(collection, collection.solutions, root, file, Solution)
    for entry in collection.solutions.values():
        collection.faults += _orphan_faults(entry, collection)
    return collection


def _read_into(
    collection: Collection, entries: dict[str, Entry[RecordT]], root: Root, file: Path, model: type[RecordT]
) -> None:
    try:
        record = read(file, model, ignore_unknown=root.layout.rules.ignore_unknown)
    except InventoryError as error:
        collection.faults += error.faults
        collection.unread.add(file.stem)
        return
    problems = []
    if isinstance(record, Definition):
        ordered = record.in_run_order()
        problems = _order_problems(record, ordered, root)
        record = ordered
    if record.name in entries:
        first = shown(entries[record.name].file)
        problems.append(Problem("name", f"{record.name!r} is taken by {first}", "rename one of the two"))
    collection.faults += faults_of(file, problems)
    entries.setdefault(record.name, Entry(root, file, record))


def _order_problems(definition: Definition, ordered: Definition, root: Root) -> list[Problem]:
    order = list(ordered.inputs)
    if not root.layout.rules.inputs_in_order or list(definition.inputs) == order:
        return []
    return [Problem("inputs", "are not in the order of `run`'s parameters", f"write them as {', '.join(order)}")]


def _orphan_faults(entry: Entry[Solution], collection: Collection) -> list[Fault]:
    name = entry.record.definition
    if name in collection.definitions or name in collection.unread:
        return []
    return faults_of(
        entry.file, [Problem("definition", f"there is no Definition {name!r}", "add it or correct the name")]
    )
