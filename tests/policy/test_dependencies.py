"""Every dependency has a reason, a pin, and a range that the version matrix really runs."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest
from repository import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINS = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def package(requirement: str) -> str:
    """Name of the distribution that a requirement asks for."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


def every_requirement() -> list[str]:
    listed = [*PROJECT["dependencies"], *(requirement for extra in EXTRAS.values() for requirement in extra)]
    return sorted({requirement for requirement in listed if package(requirement) != PROJECT["name"]})


@pytest.mark.parametrize("requirement", every_requirement())
def test_a_dependency_has_a_reason(requirement: str) -> None:
    assert f"| `{package(requirement)}` |" in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("requirement", [r for r in every_requirement() if "python_version" not in r])
def test_a_dependency_is_pinned_for_development(requirement: str) -> None:
    assert package(requirement) in PINS


def test_the_checkers_are_pinned_to_one_version() -> None:
    pinned = {package(r): r.partition("==")[2] for r in EXTRAS["dev"] if "==" in r}
    assert pinned == {tool: PINS[tool] for tool in ("mypy", "ruff")}


def test_the_version_matrix_starts_at_the_lower_bounds_and_has_the_pins() -> None:
    matrix = runpy.run_path(str(ROOT / "noxfile.py"))["ENDS"]
    bounds = {package(r): r.partition(">=")[2].split(",")[0] for r in [*PROJECT["dependencies"], *EXTRAS["cuda"]]}
    oldest = {package(r): r.partition("==")[2] for r in matrix["oldest"]}
    assert {name: version.removesuffix(".0") for name, version in oldest.items()} == {n: bounds[n] for n in oldest}
    assert {package(r): r.partition("==")[2] for r in matrix["pinned"]} == {
        name: PINS[name] for name in ("torch", "transformers")
    }
