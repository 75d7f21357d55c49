"""The repository as data, for tests that hold its rules: its files, their syntax trees, their imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tilegym_fx"
DATA_FOLDERS = ("definitions", "patterns", "solutions", "kernels")
_GENERATED = frozenset({"build", "dist", "sandbox", "__pycache__"})
_BINARY = frozenset({".png", ".pyc", ".whl", ".gguf", ".cubin"})


@cache
def files() -> tuple[Path, ...]:
    """Every file of the repository itself: no hidden folders but .ci, nothing that a tool made."""
    return tuple(sorted(_walk(ROOT)))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        hidden = entry.name.startswith(".") and entry.name not in (".ci", ".gitignore")
        if hidden or entry.name in _GENERATED or entry.name.endswith(".egg-info"):
            continue
        if entry.is_dir():
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def text_files() -> tuple[Path, ...]:
    """The files that a person reads."""
    return tuple(path for path in files() if path.suffix not in _BINARY)


def python_files(*folders: str) -> tuple[Path, ...]:
    """Python files below the folders named, or everywhere."""
    tops = folders or tuple({name(path).split("/")[0] for path in files()})
    return tuple(p for p in files() if p.suffix == ".py" and name(p).split("/")[0] in tops)


def name(path: Path) -> str:
    """The path as a person writes it: relative to the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted name and line of everything a file imports, wherever in the file it does so.

    ``from a import b`` gives ``a.b``: thus ``from tilegym_fx import match`` counts as an import of ``match``.
    Relative imports are given in full.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _source_of(node, path)
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def _source_of(node: ast.ImportFrom, path: Path) -> str:
    """The module that a ``from ... import`` names, without leading dots."""
    if not node.level:
        return node.module or ""
    here = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*here, *filter(None, [node.module])))
