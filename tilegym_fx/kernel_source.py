"""A kernel cut out of its file: the entry point and all that it needs, as a file of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from tilegym_fx.errors import KernelError


def cut_out(text: str, entry: str, name: str, docstring: str) -> str:
    """The part of a kernel file that one entry point needs.

    Args:
        text: The file.
        entry: Its function.
        name: What to call the function instead.
        docstring: Of the new file.

    Returns:
        A file that defines ``name``; comments above what is kept are kept.

    Raises:
        KernelError: The file has no such function.
    """
    tree, lines = ast.parse(text), text.splitlines()
    statements = [s for s in tree.body if not isinstance(s, ast.Import | ast.ImportFrom) and not _is_text(s)]
    homes = {bound: s for s in statements for bound in _binds(s)}
    if entry not in homes:
        raise KernelError(f"there is no function {entry!r} to cut out", advice="Name a function of the file")
    kept = _reachable(homes, entry)
    body = [(s, _lines_of(s, lines)) for s in statements if s in kept]
    used = {n.id for s in kept for n in ast.walk(s) if isinstance(n, ast.Name)}
    parts = [f'"""{docstring}"""', "", "from __future__ import annotations", "", *_imports(tree, used)]
    previous: ast.stmt | None = None
    for statement, segment in body:
        parts += [""] * _blank_lines(previous, statement)
        parts += segment
        previous = statement
    return re.sub(rf"^def {entry}\(", f"def {name}(", "\n".join(parts) + "\n", flags=re.MULTILINE)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _binds(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _reachable(homes: dict[str, ast.stmt], entry: str) -> set[ast.stmt]:
    kept: set[ast.stmt] = set()
    pending = [homes[entry]]
    while pending:
        statement = pending.pop()
        if statement not in kept:
            kept.add(statement)
            names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
            pending += [homes[n] for n in names if n in homes]
    return kept


def _lines_of(statement: ast.stmt, lines: Sequence[str]) -> list[str]:
    """A statement's lines with its decorators and the comments directly above."""
    decorators = [d.lineno for d in getattr(statement, "decorator_list", ())]
    first = min([statement.lineno, *decorators]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return list(lines[first : statement.end_lineno])


def _blank_lines(previous: ast.stmt | None, statement: ast.stmt) -> int:
    functions = ast.FunctionDef | ast.ClassDef
    if previous is None:
        return 2 if isinstance(statement, functions) else 1
    if isinstance(statement, functions) or isinstance(previous, functions):
        return 2
    return 0


def _imports(tree: ast.Module, used: set[str]) -> list[str]:
    """The imports whose names are used, in the groups that the file has them in."""
    kept: list[str] = []
    last: ast.stmt | None = None
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [a for a in statement.names if (a.asname or a.name).split(".")[0] in used]
            if names:
                if last is not None and (last.end_lineno or 0) + 1 < statement.lineno:
                    kept.append("")
                kept.append(ast.unparse(_with(statement, names)))
            last = statement
    return kept


def _with(statement: ast.Import | ast.ImportFrom, names: Iterable[ast.alias]) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import(list(names))
    return ast.ImportFrom(statement.module, list(names), statement.level)
