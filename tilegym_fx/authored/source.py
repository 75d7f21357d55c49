"""The source of one function: its syntax tree with positions, and which expression an instruction belongs
to."""

from __future__ import annotations

import ast
import hashlib
import linecache
from collections.abc import Iterator
from functools import cached_property, lru_cache
from types import CodeType


class File:
    """One parsed file; positions of its tree are turned into byte offsets of its text."""

    def __init__(self, name: str) -> None:
        self.text = "".join(linecache.getlines(name)).encode()
        self.tree = ast.parse(self.text) if self.text else None
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """The byte offset of a line and a column (in bytes)."""
        return self._starts[line - 1] + column

    def line_start(self, line: int) -> int:
        return self._starts[min(line - 1, len(self._starts) - 1)]


@lru_cache(maxsize=256)
def _file(name: str) -> File | None:
    linecache.checkcache(name)
    try:
        return File(name)
    except (SyntaxError, UnicodeDecodeError):
        return None


class FunctionSource:
    """A function as its author wrote it.

    Attributes:
        code: The code object.
        file: The file that it stands in.
        node: Its syntax tree.
        checked: Why it cannot be rewritten; empty when it can, None when nobody has looked.
    """

    def __init__(self, code: CodeType, file: File, node: ast.FunctionDef) -> None:
        self.code = code
        self.checked: str | None = None
        self.file = file
        self.node = node
        self.first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self.last_line = node.end_lineno or node.lineno

    @cached_property
    def walrus(self) -> set[str]:
        """Names that it binds inside expressions."""
        return {part.target.id for part in ast.walk(self.node) if isinstance(part, ast.NamedExpr)}

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.node) for child in ast.iter_child_nodes(parent)}

    @cached_property
    def _exact(self) -> dict[tuple[int, int, int, int], ast.expr]:
        """By where they begin and end, the outermost first: the expressions."""
        found: dict[tuple[int, int, int, int], ast.expr] = {}
        for expr in self._expressions():
            found.setdefault((expr.lineno, expr.end_lineno or 0, expr.col_offset, expr.end_col_offset or 0), expr)
        return found

    @cached_property
    def _calls_by_end(self) -> dict[tuple[int, int], ast.expr]:
        calls = (expr for expr in self._expressions() if isinstance(expr, ast.Call))
        return {(call.end_lineno or 0, call.end_col_offset or 0): call for call in calls}

    def _expressions(self) -> Iterator[ast.expr]:
        return (part for part in self._parents if isinstance(part, ast.expr))

    @cached_property
    def _positions(self) -> list[tuple[int | None, int | None, int | None, int | None]]:
        return list(self.code.co_positions()) if hasattr(self.code, "co_positions") else []

    def expr_at(self, offset: int) -> ast.expr | None:
        """The expression that the instruction at this byte offset evaluates, None if it is no
        expression's."""
        if offset < 0 or offset // 2 >= len(self._positions):
            return None
        line, end_line, column, end_column = self._positions[offset // 2]
        if line is None or end_line is None or column is None or end_column is None:
            return None
        found = self._exact.get((line, end_line, column, end_column))
        return found or self._calls_by_end.get((end_line, end_column))

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses a node, innermost first, up to the function."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement that a node is or lies in."""
        if isinstance(node, ast.stmt):
            return node
        return next((above for above in self.ancestors(node) if isinstance(above, ast.stmt)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that a statement stands in."""
        parent = self._parents[statement]
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                return value
        raise KeyError(statement)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The byte offsets between which a node's text stands in the file."""
        return (
            self.file.at(node.lineno, node.col_offset),
            self.file.at(node.end_lineno or node.lineno, node.end_col_offset or 0),
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.file.text[start:end].decode()

    def whole(self) -> tuple[int, int]:
        """The byte offsets of the function from its first decorator's line to the end of its last line."""
        return self.file.line_start(self.first_line), self.file.line_start(self.last_line + 1)

    @property
    def digest(self) -> str:
        """A hash of the function's text, decorators included."""
        start, end = self.whole()
        return hashlib.sha256(self.file.text[start:end].rstrip()).hexdigest()


@lru_cache(maxsize=1 << 15)
def children(node: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes directly below a node; looked at again and again, and never changed."""
    return tuple(ast.iter_child_nodes(node))


@lru_cache(maxsize=1 << 13)
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """A node and all nodes below it."""
    return tuple(ast.walk(node))


@lru_cache(maxsize=4096)
def function_source(code: CodeType) -> FunctionSource | None:
    """The source of a function, None if there is none to be found (built-in, lambda, generated)."""
    file = _file(code.co_filename)
    if file is None or file.tree is None:
        return None
    for node in _functions(code.co_filename):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            return FunctionSource(code, file, node)
    return None


@lru_cache(maxsize=256)
def _functions(name: str) -> tuple[ast.FunctionDef, ...]:
    file = _file(name)
    if file is None or file.tree is None:
        return ()
    return tuple(node for node in _statements(file.tree) if isinstance(node, ast.FunctionDef))


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """What is below a tree, expressions left out: they are the most of it, and hold no statement."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)
