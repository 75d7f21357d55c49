"""The child process of ``check``: runs references and spellings, and reports on each in one line of JSON.

Roots are its arguments, a JSON list of Definition names its stdin.
This is the boundary behind which an inventory's code may raise anything.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tilegym_fx.axes import Shape, declared
from tilegym_fx.errors import Fault
from tilegym_fx.inventory.collect import collect
from tilegym_fx.inventory.permalink import permalink_problem
from tilegym_fx.inventory.read import faults_of
from tilegym_fx.inventory.sizes import CannotTryError, sizes_of
from tilegym_fx.inventory.store import Inventory
from tilegym_fx.inventory.trial import sample_inputs, try_function
from tilegym_fx.schema import Definition, Problem
from tilegym_fx.spelling import Spelling


def main() -> None:
    """Reads names from stdin and writes one line for each to what was stdout."""
    reports = _take_stdout()
    names: list[str] = json.load(sys.stdin)
    inventory = Inventory(collect([Path(root) for root in sys.argv[1:]]))
    print("ready", file=reports, flush=True)
    for name in names:
        faults, notes = _try_definition(inventory, inventory.definition(name))
        json.dump({"name": name, "faults": [_as_list(fault) for fault in faults], "notes": notes}, reports)
        reports.write("\n")
        reports.flush()


def _take_stdout() -> TextIO:
    """Keeps stdout for the reports: what an inventory's code prints goes to stderr."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return reports


def _as_list(fault: Fault) -> list[str]:
    return [fault.file, fault.field, fault.problem, fault.fix]


def _try_definition(inventory: Inventory, definition: Definition) -> tuple[list[Fault], list[str]]:
    root = inventory.root_of(definition.name)
    try:
        sample_inputs(definition)
    except CannotTryError as reason:
        return [], [f"{definition.name}: the reference was not run: {reason}"]
    may_write = not root.layout.rules.writes_marked
    problems = _attempt(
        "reference",
        lambda: try_function(definition, inventory.reference(definition.name), may_write=may_write),
    )
    if problems and root.layout.rules.inputs_mean_something and _has_int_tensors(definition):
        return [], [f"{definition.name}: the reference, run on made-up indices, {problems[0].problem}"]
    faults = faults_of(inventory.file_of(definition), problems)
    pattern_file = root.path / "patterns" / f"{definition.name}.py"
    return faults + faults_of(pattern_file, _attempt("", lambda: _try_patterns(inventory, definition))), []


def _has_int_tensors(definition: Definition) -> bool:
    return any("int" in spec.dtype and not spec.is_scalar for spec in definition.inputs.values())


def _attempt(field: str, attempt: Callable[[], list[Problem]]) -> list[Problem]:
    try:
        return attempt()
    except (Exception, KeyboardInterrupt) as error:  # a real Ctrl-C reaches the parent as well, which ends this process
        text = " ".join(str(error).split())[:200]
        return [Problem(field, f"raises {type(error).__name__}: {text}", "correct the code or the inputs")]


def _try_patterns(inventory: Inventory, definition: Definition) -> list[Problem]:
    spellings = inventory.spellings(definition.name).values()
    guards = dict.fromkeys(inventory.guards(definition.name))
    for spelling in spellings:
        guards |= dict.fromkeys(spelling.guards)
    problems = [problem for guard in guards for problem in _signature_problems(guard, definition)]
    callable_guards = not problems
    problems += _shape_problems(definition, inventory.shapes(definition.name))
    for spelling in spellings:
        signature = list(_signature_problems(spelling.function, definition))
        problems += _source_problems(spelling) + signature
        if callable_guards and not signature:
            problems += _spelling_result_problems(definition, spelling)
    return problems


def _shape_problems(definition: Definition, shapes: Mapping[str, Shape | None]) -> Iterator[Problem]:
    """`SHAPES` widens what is declared: it is of inputs, and those that are declared go on to fit."""
    tensors = [name for name, spec in definition.inputs.items() if not spec.is_scalar]
    for name in shapes:
        if name not in tensors:
            yield Problem("SHAPES", f"has {name!r}, which is no tensor of the Definition", f"name one of {tensors}")
    said = declared(definition, shapes)(**sample_inputs(definition))
    if said is not None:
        yield Problem("SHAPES", f"refuses what the Definition declares: {said}", "let it fit as well")


def _source_problems(spelling: Spelling) -> list[Problem]:
    found = [f"source {problem}" for link in spelling.sources if (problem := permalink_problem(link))]
    if not spelling.sources:
        found.append("has no source")
    return [Problem(spelling.name, text, "cite the lines on a commit SHA or a release") for text in found]


def _spelling_result_problems(definition: Definition, spelling: Spelling) -> list[Problem]:
    """Tries different sizes, then equal ones: a spelling may hold for some shapes alone."""
    problems: list[Problem] = []
    for equal in (False, True):
        inputs = sample_inputs(definition, sizes_of(definition, equal=equal))
        if any(guard(**inputs) is not None for guard in spelling.guards):
            continue
        problems = _attempt("", partial(try_function, definition, spelling.function, equal=equal))
        if not problems:
            break
    return [problem._replace(field=spelling.name) for problem in problems]


def _signature_problems(function: Callable[..., Any], definition: Definition) -> Iterator[Problem]:
    parameters = list(definition.inputs)
    found = list(inspect.signature(function).parameters)
    if found != parameters:
        yield Problem(
            getattr(function, "__name__", "?"),
            f"its parameters are ({', '.join(found)})",
            f"take the Definition's inputs in order: ({', '.join(parameters)})",
        )
