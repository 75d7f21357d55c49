"""The six steps to a kernel, and the state that each is in: looked at, never remembered."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tilegym_fx import ops
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory.check import run_all
from tilegym_fx.inventory.collect import collect
from tilegym_fx.inventory.sizes import CannotTryError
from tilegym_fx.inventory.trial import sample_inputs
from tilegym_fx.kernel_check import compile_faults, disagreements, writes
from tilegym_fx.pattern import patterns_of

from .scaffold import files_of
from .subject import Subject

State = Literal["ok", "FAULT", "blocked"]
_TIME_LIMIT = 300
#: Columns that a child may fill: pytest cuts its summary at the width of the terminal.
_WIDTH = 1000
_MAX_REASON = 400


@dataclass(frozen=True)
class Step:
    """One step and its state.

    Attributes:
        title: Which step.
        state: ``blocked`` where an earlier fault hides whether there is one.
        text: What was seen; for a fault, what is wrong.
    """

    title: str
    state: State
    text: str


class _HiddenError(Exception):
    """A step cannot be looked at because of a fault that belongs to the step named."""


def look(name: str, root: Path) -> Iterator[Step]:
    """The six steps, one after another as they are looked at."""
    subject = Subject(name, root, files_of(name, root))
    stopped = ""
    for title, inspect, needs_all in _STEPS:
        try:
            if stopped and (needs_all or stopped == "interface"):
                raise _HiddenError(stopped)
            found = _missing(subject, title) or inspect(subject)
        except _HiddenError as by:
            stopped = stopped or str(by)
            yield Step(title, "blocked", f"not looked at: {by} has a fault")
            continue
        except TilegymFxError as error:
            found = [str(error)]
        if isinstance(found, str):
            yield Step(title, "ok", found)
        else:
            stopped = stopped or title
            yield Step(title, "FAULT", _first_of(found))


def _missing(subject: Subject, title: str) -> list[str]:
    absent = [subject.shown(kind) for kind in _FILES[title] if not subject.files[kind].is_file()]
    return [f"{absent[0]} is missing"] if absent else []


def _first_of(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def _interface(subject: Subject) -> str | list[str]:
    faults = subject.interface_faults() or _untriable(subject)
    if not faults:
        for outcome in run_all([subject.root], [subject.name], collect([subject.root])):
            faults += list(map(str, outcome.faults))
    if faults:
        return faults
    forms = patterns_of(subject.readable, subject.name)
    definition = subject.readable.definitions[subject.name]
    return f"({', '.join(definition.inputs)}) -> {', '.join(definition.outputs)}; {len(forms)} Patterns"


def _untriable(subject: Subject) -> list[str]:
    """Why no step could try the Definition on inputs of its own."""
    try:
        sample_inputs(subject.readable.definitions[subject.name])
    except CannotTryError as error:
        return [f"{subject.shown('definition')}: no inputs to try it on can be made up: {error}"]
    return []


def _implementation(subject: Subject) -> str | list[str]:
    if faults := subject.kernel_faults():
        return faults
    if subject.kernel_is_hidden():
        raise _HiddenError("registration")
    inventory = subject.readable
    solutions = inventory.solutions_for(subject.name)
    faults = [f"{subject.shown('kernel')}: {fault}" for s in solutions for fault in compile_faults(inventory, s.name)]
    return faults or "compiles for sm_80, sm_90, sm_100 and sm_120"


def _registration(subject: Subject) -> str | list[str]:
    if _missing(subject, "implementation") or subject.kernel_faults():
        raise _HiddenError("implementation")
    if faults := subject.solution_faults():
        return list(map(str, faults))
    inventory = subject.inventory()
    ops.register(inventory)
    overload = ops.overload(subject.name)
    inputs = tuple(sample_inputs(inventory.definitions[subject.name]).values())
    try:
        torch.library.opcheck(overload, inputs, test_utils=("test_schema", "test_faketensor"))
    except (RuntimeError, AssertionError, TypeError) as error:
        return [f"torch.library.opcheck: {' '.join(str(error).split())[:300]}"]
    solutions = inventory.solutions_for(subject.name)
    written = [f"{s.spec.entry_point}: {fault}" for s in solutions for fault in writes(inventory, s.name)]
    return written or f"torch.ops.tilegym_fx.{subject.name} by {', '.join(s.name for s in solutions)}"


def _tests(subject: Subject) -> str | list[str]:
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--color=no"]
    return _in_child(subject, "test", ["-m", "pytest"], options, _why_pytest_failed)


def _why_pytest_failed(lines: list[str]) -> list[str]:
    """Each failed test with its error; of a file that cannot be imported pytest says it in an ``E`` line alone."""
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    last = ([error for error in errors if _is_error(error)] or errors)[-1:]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return [_clipped(line if " - " in line else ": ".join([line, *last])) for line in failed]


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def _benchmark(subject: Subject) -> str | list[str]:
    text = subject.files["benchmark"].read_text(encoding="utf-8")
    if "-GBps" not in text and "-TFLOPS" not in text:
        return [f"{subject.shown('benchmark')}: no plot_name ends in -GBps or -TFLOPS"]
    said = _in_child(subject, "benchmark", [], ["--print-data"], lambda lines: list(filter(_is_error, lines)))
    if isinstance(said, list):
        return said
    return "correct, then timed" if torch.cuda.is_available() else "correct; not timed: no CUDA device here"


def _is_error(line: str) -> bool:
    return line.startswith("error: ") or re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line) is not None


def _in_child(
    subject: Subject, kind: str, how: list[str], options: list[str], why: Callable[[list[str]], list[str]]
) -> str | list[str]:
    """Run Python on a file: its last line, or why it failed and the command that shows more.

    Args:
        subject: Whose file.
        kind: Which file.
        how: What comes before the file on Python's command line.
        options: What comes after it.
        why: Lines of a failure -> its reasons.
    """
    file = subject.files[kind]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": str(_WIDTH)}
    command = [sys.executable, *how, str(file), *options]
    try:
        done = subprocess.run(
            command, cwd=subject.root, env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return [f"{file.name} took longer than {_TIME_LIMIT} s"]
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == 0:
        return lines[-1] if lines else "done"
    reasons = why(lines) or lines[-1:] or [f"exit status {done.returncode}"]
    return [f"{_first_of(reasons)}; to see all: {_shown_command([*how, str(_from_here(file))])}"]


def _from_here(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _shown_command(arguments: list[str]) -> str:
    return f"`{shlex.join(['python', *arguments])}`"


def _verification(subject: Subject) -> str | list[str]:
    inventory = subject.inventory()
    solutions = [s.name for s in inventory.solutions_for(subject.name)]
    faults = [f"{s}: {fault}" for s in solutions for fault in disagreements(inventory, s)]
    if faults:
        return faults
    if not torch.cuda.is_available():
        return "the interpreter agrees with the reference; on a GPU not looked at: no CUDA device here"
    faults = [f"{s} on the GPU: {f}" for s in solutions for f in disagreements(inventory, s, device="cuda")]
    return faults or "the interpreter and the GPU agree with the reference"


_STEPS: tuple[tuple[str, Callable[[Subject], str | list[str]], bool], ...] = (
    ("interface", _interface, False),
    ("implementation", _implementation, False),
    ("registration", _registration, False),
    ("tests", _tests, True),
    ("benchmark", _benchmark, True),
    ("verification", _verification, True),
)
_FILES = {
    "interface": ("definition", "patterns"),
    "implementation": ("kernel",),
    "registration": ("solution",),
    "tests": ("test",),
    "benchmark": ("benchmark",),
    "verification": (),
}
