"""Which names a statement reads and binds, and whether a name is still needed after a statement.

Everything here is about the text, not about one run: a branch that was not taken reads and binds like any
other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache

from ..authored.source import FunctionSource, children

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_EVERYTHING = {"locals", "vars", "eval", "exec", "dir"}


def reads(node: ast.AST, without: Iterable[ast.AST] = ()) -> frozenset[str]:
    """Names read anywhere inside a node, except inside the nodes in `without`."""
    skipped = frozenset(without)
    return _reads(node, skipped) if skipped else _all_reads(node)


@lru_cache(maxsize=1 << 14)
def _all_reads(node: ast.AST) -> frozenset[str]:
    return _reads(node, frozenset())


def _reads(node: ast.AST, skipped: frozenset[ast.AST]) -> frozenset[str]:
    found: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        at = todo.pop()
        if at in skipped:
            continue
        if isinstance(at, ast.Name) and isinstance(at.ctx, (ast.Load, ast.Del)):
            found.add(at.id)
        if isinstance(at, ast.AugAssign) and isinstance(at.target, ast.Name):
            found.add(at.target.id)
        todo.extend(children(at))
    return frozenset(found)


@lru_cache(maxsize=1 << 14)
def binds(node: ast.AST) -> frozenset[str]:
    """Names bound or deleted anywhere inside a node, nested blocks included, nested functions not."""
    found: set[str] = set()
    todo: list[ast.AST] = [node]
    while todo:
        at = todo.pop()
        if isinstance(at, ast.Name) and isinstance(at.ctx, (ast.Store, ast.Del)):
            found.add(at.id)
        elif isinstance(at, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and at.name:
            found.add(at.name)
        elif isinstance(at, ast.alias):
            found.add((at.asname or at.name).split(".")[0])
        if not isinstance(at, _SCOPES) or at is node:
            todo.extend(children(at))
    return frozenset(found)


def always_binds(statement: ast.stmt) -> set[str]:
    """Names that a simple statement binds whenever it runs."""
    if isinstance(statement, ast.Assign):
        return {name for target in statement.targets for name in target_names(target) or ()}
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return set(target_names(statement.target) or ())
    return set()


def target_names(target: ast.expr) -> list[str] | None:
    """The names of an assignment target made of names only, in order; None for any other target."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, (ast.Tuple, ast.List)):
        names: list[str] = []
        for element in target.elts:
            if not isinstance(element, ast.Name):
                return None
            names.append(element.id)
        return names
    return None


def sees_all_locals(function: ast.FunctionDef) -> bool:
    """Whether a function looks at its locals in a way that no analysis of names can follow."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _EVERYTHING
        for node in ast.walk(function)
    )


@lru_cache(maxsize=1 << 10)
def captured(function: ast.FunctionDef) -> frozenset[str]:
    """Names that functions nested in this one read or rebind, and names declared global or nonlocal."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, _SCOPES) and node is not function:
            found |= reads(node) | binds(node)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            found |= set(node.names)
    return frozenset(found)


def needed_after(source: FunctionSource, statement: ast.stmt, name: str, removed: Iterable[ast.AST] = ()) -> bool:
    """Whether some path from the end of a statement reads a name before binding it again.

    Args:
        source: The function.
        statement: Where to start; what it encloses is not looked at.
        name: The local.
        removed: Statements and expressions that will be gone, so read nothing.
    """
    gone = set(removed)
    if name in captured(source.node):
        return True
    at: ast.stmt = statement
    while True:
        block = source.block(at)
        for later in block[block.index(at) + 1 :]:
            if later in gone:
                continue
            if name in reads(later, gone):
                return True
            if name in always_binds(later):
                return False
        above = source.parent(at)
        if above is source.node or not isinstance(above, ast.stmt):
            if not isinstance(above, (ast.ExceptHandler, ast.match_case)):
                return False
            above = source.parent(above)
        if isinstance(above, (ast.For, ast.While, ast.AsyncFor)) and name in reads(above, gone):
            return True
        if isinstance(above, ast.Try) and any(
            name in reads(part, gone) for part in (*above.handlers, *above.orelse, *above.finalbody)
        ):
            return True
        assert isinstance(above, ast.stmt)
        at = above
