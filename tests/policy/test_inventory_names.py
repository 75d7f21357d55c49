"""One name through every folder: definitions, solutions, patterns, kernels and their tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, name, python_files, tree


def records(folder: str) -> dict[str, dict[str, Any]]:
    """File stem -> content of every JSON file directly in a folder."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).glob("*.json"))}


DEFINITIONS = records("definitions")
SOLUTIONS = records("solutions")


def entry_file(solution: str) -> str:
    return str(SOLUTIONS[solution]["spec"]["entry_point"].partition("::")[0])


def test_there_is_an_inventory() -> None:
    assert len(DEFINITIONS) >= 20


def test_files_are_named_after_what_they_hold() -> None:
    held = {stem: record["name"] for stem, record in (DEFINITIONS | SOLUTIONS).items()}
    assert {stem: held_name for stem, held_name in held.items() if stem != held_name} == {}


def test_every_definition_has_a_solution_and_the_other_way_round() -> None:
    assert {record["definition"] for record in SOLUTIONS.values()} == DEFINITIONS.keys()


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_a_solution_is_named_after_its_definition(solution: str) -> None:
    definition = SOLUTIONS[solution]["definition"]
    assert solution == definition or solution.startswith(f"{definition}_")


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_an_entry_point_is_there_and_takes_the_inputs_in_order(solution: str) -> None:
    file, _, function = SOLUTIONS[solution]["spec"]["entry_point"].partition("::")
    assert (ROOT / file).is_file(), f"{solution}: {file} is missing"
    defined = {n.name: n for n in tree(ROOT / file).body if isinstance(n, ast.FunctionDef)}
    assert function in defined, f"{solution}: {file} has no function {function}"
    parameters = [argument.arg for argument in defined[function].args.args]
    assert parameters == list(DEFINITIONS[SOLUTIONS[solution]["definition"]]["inputs"])


@pytest.mark.parametrize("path", python_files("patterns"), ids=name)
def test_a_patterns_file_belongs_to_a_definition(path: Path) -> None:
    assert path.stem in DEFINITIONS


@pytest.mark.parametrize("path", python_files("kernels"), ids=name)
def test_a_kernels_file_is_used_by_a_solution(path: Path) -> None:
    assert name(path) in {source["path"] for solution in SOLUTIONS.values() for source in solution["sources"]}


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_a_definition_is_tested_by_name(definition: str) -> None:
    """tests/patterns names each Definition: in a file of its own, or in one shared with its family."""
    own = ROOT / "tests" / "patterns" / f"test_{definition}.py"
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "patterns").glob("*.py")]
    assert own.is_file() or any(f'"{definition}"' in text for text in texts)
