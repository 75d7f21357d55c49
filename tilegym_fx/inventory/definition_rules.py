"""Rules for Definitions beyond the schema: each yields a Problem for all that is wrong and runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tilegym_fx.inventory.permalink import permalink_problem, source_links
from tilegym_fx.inventory.tags import FLAGS, tag_problems
from tilegym_fx.schema import Definition, Problem

if TYPE_CHECKING:
    from tilegym_fx.inventory.collect import Entry

_SNAKE = re.compile(r"[a-z][a-z0-9_]*")


def definition_file(entry: Entry[Definition]) -> Iterator[Problem]:
    yield from place_problems(entry, "definitions")
    if not _SNAKE.fullmatch(entry.record.name):
        yield Problem("name", f"{entry.record.name!r} is not in snake_case", "an op is named after it: use a-z, 0-9, _")
    if not entry.record.description:
        yield Problem("description", "is missing", "say in one sentence what is computed")


def exact_parameters(entry: Entry[Definition]) -> Iterator[Problem]:
    extra = [arg.arg for arg in entry.record.run_parameters() if arg.arg not in entry.record.inputs]
    for name in extra:
        yield Problem("reference", f"`run` has a parameter {name!r} that is no input", "add the input or remove it")


def inputs_only_read(entry: Entry[Definition]) -> Iterator[Problem]:
    for name, spec in entry.record.inputs.items():
        if spec.inplace_output:
            yield Problem(f"inputs.{name}.inplace_output", "is true", "ours never write to an input: return the value")


def sources_cited(entry: Entry[Definition]) -> Iterator[Problem]:
    links = source_links(entry.record.reference)
    if not links:
        yield Problem("reference", "does not begin with `# Source:`", "cite the upstream lines that it restates")
    for link in links:
        if problem := permalink_problem(link):
            yield Problem("reference", f"source {problem}", "link the lines on a commit SHA or a release tag")


def fused_cites_every_region(entry: Entry[Definition]) -> Iterator[Problem]:
    if "fused" in entry.record.tags and len(source_links(entry.record.reference)) < 2:
        yield Problem(
            "reference",
            "is tagged `fused` but cites one upstream region",
            "add a `# Source:` for each region",
        )


def definition_tags(entry: Entry[Definition]) -> Iterator[Problem]:
    yield from tag_problems(entry.record.tags, ("model", "stage", "status", "dtype"), FLAGS)
    if len(entry.record.tag_values("status")) != 1:
        yield Problem("tags", "need exactly one `status:`", "add status:draft, status:unverified or status:verified")


def axes_used(entry: Entry[Definition]) -> Iterator[Problem]:
    definition = entry.record
    used = {axis for spec in (*definition.inputs.values(), *definition.outputs.values()) for axis in spec.shape or ()}
    constrained = {name for text in definition.constraints for name in _names(text)}
    for axis in definition.axes:
        if axis not in used | constrained:
            yield Problem(f"axes.{axis}", "is in no shape", "remove it or use it")
    for name in sorted(constrained - definition.axes.keys() - definition.inputs.keys()):
        yield Problem("constraints", f"name {name!r}, which is neither an axis nor an input", "correct the name")


def place_problems(entry: Entry[Any], folder: str) -> Iterator[Problem]:
    if entry.file.stem != entry.record.name:
        yield Problem("name", f"is {entry.record.name!r} in a file called {entry.file.name}", "give both one name")
    if entry.file.parent != entry.root.path / folder:
        yield Problem("", f"lies in a sub-folder of {folder}/", f"move it to {folder}/ itself")


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
