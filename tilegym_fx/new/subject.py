"""What the files of one kernel say before anything in them runs, told apart by the step that has to mend it."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilegym_fx.errors import Fault
from tilegym_fx.inventory import Inventory
from tilegym_fx.inventory.check import check
from tilegym_fx.inventory.collect import Collection, Entry
from tilegym_fx.inventory.read import faults_of, shown
from tilegym_fx.inventory.solution_rules import entry_point_signature
from tilegym_fx.schema import UNPARSABLE, Problem, Solution

from .scaffold import collected, inventory_of

#: Fields of a Solution whose faults hide its kernel; with others the kernel can still be looked at.
_WAYS_TO_THE_KERNEL = ("spec.entry_point", "spec.language", "sources.")


@dataclass(frozen=True)
class Subject:
    """A kernel by name, and its files by kind."""

    name: str
    root: Path
    files: dict[str, Path]

    def shown(self, kind: str) -> str:
        """A file's path in the root."""
        return self.files[kind].relative_to(self.root).as_posix()

    def inventory(self) -> Inventory:
        """The whole inventory.

        Raises:
            InventoryError: Something in it is unusable.
        """
        return inventory_of(self.root)

    @functools.cached_property
    def _collection(self) -> Collection:
        return collected(self.root)

    @functools.cached_property
    def readable(self) -> Inventory:
        """What can be read of the inventory: a fault in one file must not be told of another."""
        return Inventory(self._collection)

    @functools.cached_property
    def _faults(self) -> tuple[Fault, ...]:
        own = check([self.root], execute=False).faults
        return tuple(dict.fromkeys([*own, *self._collection.faults]))

    @functools.cached_property
    def _solutions(self) -> list[Entry[Solution]]:
        return [entry for entry in self._collection.solutions.values() if self._is_meant(entry)]

    def _is_meant(self, entry: Entry[Solution]) -> bool:
        return entry.record.definition == self.name or entry.file == self.files["solution"]

    def interface_faults(self) -> list[str]:
        """Faults in the Definition's file and in that of its patterns."""
        places = (f"/definitions/{self.name}.", f"/patterns/{self.name}.")

        def concerns(fault: Fault) -> bool:
            path = fault.file.replace(os.sep, "/")
            return any(place in f"/{path}" for place in places)

        return [str(fault) for fault in self._faults if concerns(fault)]

    def kernel_faults(self) -> list[str]:
        """Why a kernel's file cannot be looked at as the Definition's: it is no Python, or takes something else."""
        files = [self.files["kernel"], *(file for entry in self._solutions if (file := _kernel_file(entry)))]
        unparsable = [text for file in dict.fromkeys(files) if (text := self._unparsable(file))]
        return unparsable or [str(fault) for entry in self._solutions for fault in self._unlike_definition(entry)]

    def _unparsable(self, file: Path) -> str:
        where = file.relative_to(self.root).as_posix() if file.is_relative_to(self.root) else str(file)
        try:
            ast.parse(file.read_text(encoding="utf-8"))
        except SyntaxError as error:
            return f"{where}, line {error.lineno}: no valid Python ({error.msg})"
        except UNPARSABLE as error:
            return f"{where}: no valid Python ({error})"
        return ""

    def _unlike_definition(self, entry: Entry[Solution]) -> Iterator[Fault]:
        if not self._misnamed(entry):
            for problem in self._signature_problems(entry):
                yield Fault(entry.record.entry_file, entry.record.entry_function, problem.problem, problem.fix)

    def _signature_problems(self, entry: Entry[Solution]) -> list[Problem]:
        if entry.record.definition != self.name:
            return []
        return list(entry_point_signature(entry, self.readable.definitions.get(self.name)))

    def solution_faults(self) -> list[Fault]:
        """What is wrong in the Solutions themselves: not what their kernels' files have to mend."""
        files = {shown(self.files["solution"]), *(shown(entry.file) for entry in self._solutions)}
        others = {f for e in self._solutions for f in faults_of(e.file, self._signature_problems(e))}
        return [
            *(fault for entry in self._solutions for fault in faults_of(entry.file, self._pointing_problems(entry))),
            *(fault for fault in self._faults if fault.file in files and fault not in others),
        ]

    def _pointing_problems(self, entry: Entry[Solution]) -> list[Problem]:
        record = entry.record
        if record.definition != self.name:
            return [Problem("definition", f"is {record.definition!r}, not {self.name!r}", "name its own Definition")]
        if self._misnamed(entry):
            problem = f"is {record.entry_function!r}, and {record.entry_file} has a function {self.name!r}"
            return [Problem("spec.entry_point", problem, "name that one, or call it something else")]
        return []

    def _misnamed(self, entry: Entry[Solution]) -> bool:
        """Whether the function that carries the Definition's name is passed over for another that exists."""
        if entry.record.name != self.name or entry.record.entry_function == self.name:
            return False
        file = _kernel_file(entry)
        return file is not None and {self.name, entry.record.entry_function} <= _functions(file)

    def kernel_is_hidden(self) -> bool:
        """Whether no Solution, or only a faulty one, says which function is the kernel."""
        if not self.readable.solutions_for(self.name):
            return True
        return any(fault.field.startswith(_WAYS_TO_THE_KERNEL) for fault in self.solution_faults())


def _kernel_file(entry: Entry[Solution]) -> Path | None:
    return entry.root.find(entry.file, entry.record.entry_file)


def _functions(file: Path) -> set[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except UNPARSABLE:
        return set()
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
