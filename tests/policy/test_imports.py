"""Which module may know which: the flow of the design as a table. A new module needs a row."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
from repository import PACKAGE, ROOT, imports, name, python_files

#: Known to everyone, knowing nobody but each other.
GROUND = frozenset({"errors", "recording", "results", "settings"})

#: Module -> what it may import from tilegym_fx besides GROUND. `__init__` may name anything, lazily.
MAY_IMPORT: dict[str, set[str]] = {
    "schema": set(),
    "spelling": set(),
    "inventory": {"axes", "folding", "schema", "spelling"},
    "export": set(),
    "provenance": {"export"},
    "normalize": set(),
    "facts": {"normalize"},
    "probes": {"schema"},
    "axes": {"schema"},
    "sketch": {"normalize"},
    "pattern": {"axes", "facts", "inventory", "normalize", "probes", "schema", "sketch"},
    "writing": {"facts", "normalize"},
    "match": {"facts", "normalize", "pattern", "schema", "writing"},
    "cost": set(),
    "plan": {"cost", "inventory", "schema"},
    "interpreter": set(),
    "launch": {"interpreter"},
    "compile": {"inventory", "launch"},
    "ops": {"inventory", "schema"},
    "rewrite": {"normalize", "ops"},
    "layers": set(),
    "layer_runs": {"layers"},
    "authored": set(),
    "emit": {"authored", "layers", "provenance"},
    "apply": {"authored"},
    "verify": {"export"},
    "closeness": set(),
    "choices": {"closeness"},
    "places": {"choices", "closeness", "ops", "verify"},
    "model_source": set(),
    "pipeline": {"cost", "facts", "inventory", "match", "normalize", "pattern", "plan"},
    "reports": {"pipeline"},
    "forms": {"emit", "export", "inventory", "pipeline", "plan", "provenance"},
    "survey": {"export", "forms", "inventory", "model_source", "pipeline", "plan"},
    "folding": set(),
    "render": {"folding", "survey"},
    "draft": {"export", "normalize", "reference", "region", "survey"},
    "alone": set(),
    "live_model": {"ops"},
    "live_report": {"apply", "export", "layers", "pipeline", "verify"},
    "planner": {
        "choices",
        "cost",
        "emit",
        "export",
        "inventory",
        "layer_runs",
        "layers",
        "live_model",
        "live_report",
        "pipeline",
        "plan",
        "provenance",
    },
    "judging": {"choices", "export", "ops", "places", "verify"},
    "tuning": set(),
    "reached": {"authored"},
    "fingerprint": {"authored", "export", "layers", "reached"},
    "plan_cache": {"apply", "cost", "fingerprint", "inventory", "live_model", "live_report"},
    "rehearsal": {"compile", "export", "inventory", "layers", "ops", "tuning", "verify"},
    "live": {
        "alone",
        "apply",
        "export",
        "fingerprint",
        "folder_form",
        "judging",
        "live_model",
        "live_report",
        "ops",
        "plan_cache",
        "planner",
        "rehearsal",
        "verify",
    },
    "__main__": set(),
    "options": set(),
    "doctor": {"compile", "inventory", "launch", "ops", "tuning"},
    "bench": {"backend", "doctor", "export", "inventory", "live", "model_source", "ops", "options", "survey", "verify"},
    "tune": {"bench", "compile", "cost", "inventory", "launch", "plan", "survey", "tuning"},
    "backend": {"cost", "export", "inventory", "normalize", "ops", "pipeline", "plan", "reports", "rewrite"},
    "scan": {
        "apply",
        "options",
        "breadth",
        "cost",
        "draft",
        "folder_form",
        "inventory",
        "model_source",
        "plan",
        "planner",
        "render",
        "survey",
    },
    "adapters": {"kernel_source", "schema"},
    "autokernelize": {
        "adapters",
        "bench",
        "candidates",
        "closeness",
        "cost",
        "draft",
        "emit",
        "export",
        "inventory",
        "kernel_check",
        "kernel_source",
        "launch",
        "match",
        "model_source",
        "new",
        "ops",
        "pattern",
        "pipeline",
        "plan",
        "provenance",
        "rewrite",
        "schema",
        "survey",
        "synth",
    },
    "breadth": {
        "cost",
        "export",
        "inventory",
        "live",
        "model_source",
        "pipeline",
        "plan",
        "live_report",
        "survey",
        "verify",
    },
    "candidates": {"adapters", "inventory", "kernel_check", "match", "normalize", "pattern", "schema"},
    "folder_form": {"apply", "inventory"},
    "kernel_bench": {"inventory", "kernel_check", "ops"},
    "kernel_check": {"closeness", "compile", "inventory", "launch", "match", "pattern", "schema"},
    "kernel_source": set(),
    "new": {"inventory", "kernel_check", "kernel_source", "ops", "pattern", "schema", "synth"},
    "reference": set(),
    "region": {"export", "normalize", "reference"},
    "synth": {"inventory", "normalize", "pattern", "schema"},
}

#: Packages that only some modules may import: what they are about stays in one place.
ONLY_IN: dict[str, set[str]] = {
    "transformers": {"bench", "breadth", "export", "model_source"},
    "huggingface_hub": {"model_source"},
    "cuda": {"compile", "interpreter", "launch", "recording"},
    "networkx": {"draft", "match", "plan", "region", "rewrite"},
    "pydantic": {"inventory", "plan_cache", "schema"},
    "rich": {"bench", "folding", "inventory", "render", "scan"},
    "argparse": {"autokernelize", "bench", "doctor", "inventory", "kernel_bench", "new", "options", "scan", "tune"},
}

#: Module -> what it must not know of at all.
MUST_NOT_KNOW: dict[str, set[str]] = {"schema": {"torch", "pathlib", "os"}, "results": {"pathlib", "os"}}

FILES = [path for path in python_files("tilegym_fx") if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    """Name of the top-level module or sub-package that a file of the package belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def own_imports(path: Path) -> dict[str, int]:
    """Modules of tilegym_fx that a file imports, itself and the ground left out, with a line each."""
    found = {}
    for dotted, line in imports(path):
        top, _, rest = dotted.partition(".")
        module = rest.split(".")[0]
        if top == "tilegym_fx" and module not in GROUND | {module_of(path), ""}:
            found[module] = line
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_imports_only_what_its_row_allows(path: Path) -> None:
    module = module_of(path)
    assert module in GROUND or module in MAY_IMPORT, f"{module} has no row in MAY_IMPORT: add one, and to docs/index.md"
    extra = own_imports(path).keys() - MAY_IMPORT.get(module, set())
    assert not extra, f"{module} may not import {sorted(extra)} (lines {own_imports(path)})"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_package_is_imported_only_where_it_belongs(path: Path) -> None:
    module = module_of(path)
    tops = {dotted.split(".")[0] for dotted, _ in imports(path)}
    strangers = {top for top in tops & ONLY_IN.keys() if module not in ONLY_IN[top]}
    assert not strangers | (tops & MUST_NOT_KNOW.get(module, set()))


@pytest.mark.parametrize("module", sorted({module_of(path) for path in FILES}))
def test_a_module_is_described_in_the_docs(module: str) -> None:
    rows = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert any(f"`{module}`" in row.split("|")[1] for row in rows if row.startswith("|"))


def test_the_table_has_no_cycle() -> None:
    edges = [(module, target) for module, targets in MAY_IMPORT.items() for target in targets]
    assert list(nx.simple_cycles(nx.DiGraph(edges))) == []


@pytest.mark.parametrize("folder", ["patterns", "kernels"])
def test_data_folders_know_what_they_are_for(folder: str) -> None:
    """Spellings are marked; kernels are launched, with tiles that may have been measured."""
    known = {"patterns": ("tilegym_fx.spelling.",), "kernels": ("tilegym_fx.launch.", "tilegym_fx.tuning")}[folder]
    for path in python_files(folder):
        ours = {dotted for dotted, _ in imports(path) if dotted.startswith("tilegym_fx")}
        assert all(dotted.startswith(known) for dotted in ours), f"{name(path)}: {ours}"
        assert "transformers" not in {dotted.split(".")[0] for dotted, _ in imports(path)}, name(path)
