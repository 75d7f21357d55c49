"""Rules about the text of the source, each held by reading it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import name, python_files, text_files, tree

CODE = python_files("tilegym_fx", "patterns", "kernels")
OUTSIDE_KERNELS = tuple(path for path in python_files() if not name(path).startswith("kernels/"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

#: Absolute folders of one machine, and hosts that packages come from.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:root|home|opt|work|Users|mnt)/")
PACKAGE_HOST = re.compile(
    r"\b(?:pypi|pythonhosted|anaconda|npmjs|crates|golang)\.(?:org|io|com)\b"
    r"|download\.pytorch\.org|index-url[ =]+https?:",
    re.IGNORECASE,
)
#: Run references or kernels just written in processes of their own, and report whatever they raise.
MAY_CATCH_ALL = frozenset(
    {"tilegym_fx/inventory/worker.py", "tilegym_fx/rehearsal.py", "benchmarks/bench_synthesised.py"}
)
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X{3})\b")


def matching_lines(pattern: re.Pattern[str], path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [f"{name(path)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if pattern.search(line)]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, PACKAGE_HOST, UNFINISHED], ids=["path", "host", "unfinished"])
def test_no_file_names(pattern: re.Pattern[str]) -> None:
    assert [line for path in text_files() for line in matching_lines(pattern, path)] == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (MACHINE_PATH, "see " + "/".join(["", "home", "me", "x"])),
        (PACKAGE_HOST, "https://" + ".".join(["pypi", "org"]) + "/simple"),
        (UNFINISHED, "# " + "TO" + "DO: later"),
    ],
    ids=["path", "host", "unfinished"],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


ENVIRONMENT = frozenset({"environ", "environb", "getenv"})


def environment_reads(path: Path) -> list[int]:
    """Lines that look into the environment. ``{**os.environ}``, to hand it to a child process, does not."""
    nodes = list(ast.walk(tree(path)))
    dicts = [node for node in nodes if isinstance(node, ast.Dict)]
    handed_on = {id(v) for d in dicts for k, v in zip(d.keys, d.values, strict=True) if k is None}
    uses = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ENVIRONMENT and id(n) not in handed_on]
    imported = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "os"]
    names = [n for n in imported if ENVIRONMENT & {alias.name for alias in n.names}]
    return sorted(node.lineno for node in (*uses, *names))


@pytest.mark.parametrize("path", [p for p in CODE if name(p) != "tilegym_fx/settings.py"], ids=name)
def test_only_settings_reads_the_environment(path: Path) -> None:
    assert environment_reads(path) == []


def broad_catches(path: Path) -> Iterator[int]:
    """Lines that catch every exception there is, unless to clean up and raise again, or suppress it."""
    for node in ast.walk(tree(path)):
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            caught = list(node.type.elts) if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = list(node.args)
        if any(type_ is None or ast.unparse(type_) in ("Exception", "BaseException") for type_ in caught):
            yield node.lineno


@pytest.mark.parametrize("path", [p for p in python_files() if name(p) not in MAY_CATCH_ALL], ids=name)
def test_no_broad_except(path: Path) -> None:
    assert list(broad_catches(path)) == []


@pytest.mark.parametrize("path", OUTSIDE_KERNELS, ids=name)
def test_files_and_functions_can_be_read_in_one_go(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {f: size for f, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", python_files("tilegym_fx", "patterns", "kernels"), ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path))


def kernel_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in tree(path).body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any(ast.unparse(d).startswith("ct.kernel") for d in f.decorator_list)]


def waits_late(function: ast.FunctionDef) -> bool:
    """Whether it calls ``ct.grid_dependency_control_wait``, but not before everything that may touch memory."""
    calls = [ast.unparse(statement) for statement in function.body]
    wait, signal = "ct.grid_dependency_control_wait()", "ct.grid_dependency_control_launch_dependents()"
    return any("grid_dependency_control" in call for call in calls) and calls[0] != wait and calls[:2] != [signal, wait]


@pytest.mark.parametrize("path", python_files("kernels"), ids=name)
def test_no_kernel_leaves_minus_infinity_to_padding(path: Path) -> None:
    """Of float32 tiles an H200 made zeros (benchmarks/2026-11-30_h200/README.md)."""
    assert "NEG_INF" not in path.read_text(encoding="utf-8")


def test_a_kernel_that_may_start_early_waits_before_it_does_anything() -> None:
    kernels = [(name(path), f) for path in python_files("kernels") for f in kernel_functions(path)]
    assert len(kernels) > 20
    assert [f"{file}: {f.name}" for file, f in kernels if waits_late(f)] == []
    late = "def k(x):\n    tile = ct.load(x, (0,), (16,))\n    ct.grid_dependency_control_wait()"
    parsed = ast.parse(late).body[0]
    assert isinstance(parsed, ast.FunctionDef)
    assert waits_late(parsed)
