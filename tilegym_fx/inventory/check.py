"""Every fault of some roots: in the files, between them, against the house rules, and in what code computes.

References and spellings run in a child process, so that one which crashes, exits or hangs is one fault.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilegym_fx.errors import Fault, InternalError
from tilegym_fx.inventory.collect import Collection, collect
from tilegym_fx.inventory.read import faults_of
from tilegym_fx.schema import UNPARSABLE, Problem

#: Seconds that the child may take to start, which imports torch, and to report on one Definition.
_START_PATIENCE = 300.0
_PATIENCE = 60.0
#: The child's program: the worker of this very package, wherever that was imported from.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import tilegym_fx.inventory.worker as w; w.main()"


@dataclass
class Result:
    """What a check found.

    Attributes:
        definitions: How many Definitions could be read.
        solutions: How many Solutions could be read.
        faults: Everything that is wrong, by file.
        notes: What could not be tried, and why; no faults.
    """

    definitions: int
    solutions: int
    faults: list[Fault]
    notes: list[str] = field(default_factory=list)


def check(paths: Sequence[Path], *, execute: bool = True) -> Result:
    """Checks inventories.

    Args:
        paths: The roots.
        execute: Run references and spellings on small inputs; otherwise files are only parsed.

    Raises:
        InventoryError: A path is no inventory at all.
    """
    collection = collect(paths)
    result = Result(len(collection.definitions), len(collection.solutions), list(collection.faults))
    result.faults += _rule_faults(collection)
    result.faults += _pattern_file_faults(collection)
    if execute:
        for outcome in run_all(paths, list(collection.definitions), collection):
            result.faults += outcome.faults
            result.notes += outcome.notes
    result.faults.sort(key=lambda fault: (fault.file, fault.field))
    return result


def _rule_faults(collection: Collection) -> Iterator[Fault]:
    for definition in collection.definitions.values():
        for definition_rule in definition.root.layout.rules.definition:
            yield from faults_of(definition.file, definition_rule(definition))
    for solution in collection.solutions.values():
        target = collection.definitions.get(solution.record.definition)
        record = target.record if target else None
        for solution_rule in solution.root.layout.rules.solution:
            yield from faults_of(solution.file, solution_rule(solution, record))


def _pattern_file_faults(collection: Collection) -> Iterator[Fault]:
    for root in collection.roots:
        for file in root.pattern_files():
            problems = []
            if file.stem not in collection.definitions and file.stem not in collection.unread:
                problems.append(
                    Problem("", f"there is no Definition {file.stem!r}", "name the file after its Definition")
                )
            try:
                ast.parse(file.read_bytes())
            except UNPARSABLE as error:
                problems.append(Problem("", f"is no valid Python ({error})", "correct the code"))
            yield from faults_of(file, problems)


@dataclass
class Outcome:
    """What running one Definition's code showed."""

    name: str
    faults: list[Fault]
    notes: list[str]


def run_all(paths: Sequence[Path], names: Sequence[str], collection: Collection) -> Iterator[Outcome]:
    """Runs the reference and the spellings of each Definition in a child process, restarted after a crash."""
    pending = list(names)
    while pending:
        child = _Child()
        for outcome in child.run(paths, pending):
            pending.remove(outcome.name)
            yield outcome
        if pending:
            # The child ended before it reported on the next one, so that one is what ended it.
            name = pending.pop(0)
            problem = Problem("reference", f"running it {child.end}", "run it by hand and correct it")
            yield Outcome(name, faults_of(collection.definitions[name].file, [problem]), [])


class _Child:
    """One run of the worker; ``end`` says in words how it ended."""

    def __init__(self) -> None:
        self.end = ""
        self._hung = False

    def run(self, paths: Sequence[Path], names: Sequence[str]) -> Iterator[Outcome]:
        """Yields what the child reports, until it ends.

        Raises:
            InternalError: It did not start.
        """
        package_folder = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", _START, package_folder, *map(os.path.abspath, paths)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        ) as process:
            assert process.stdin is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(list(names)))
                    process.stdin.close()
                lines = self._lines(process)
                if next(lines, None) != "ready\n":
                    raise InternalError("the child process that runs references did not start")
                for line in lines:
                    message = json.loads(line)
                    yield Outcome(message["name"], [Fault(*fault) for fault in message["faults"]], message["notes"])
            finally:
                process.kill()

    def _lines(self, process: subprocess.Popen[str]) -> Iterator[str]:
        assert process.stdout is not None
        for patience in itertools.chain([_START_PATIENCE], itertools.repeat(_PATIENCE)):
            watch = threading.Timer(patience, self._kill, [process])
            watch.daemon = True
            watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if not line:
                break
            yield line
        self.end = f"took longer than {_PATIENCE:.0f} s" if self._hung else _words(process.wait())

    def _kill(self, process: subprocess.Popen[str]) -> None:
        self._hung = True
        process.kill()


def _words(code: int) -> str:
    return f"killed the process (signal {-code})" if code < 0 else f"ended the process (exit code {code})"
