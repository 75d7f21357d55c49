"""The source of one function: its syntax tree with positions, and which expression an instruction belongs
to."""

from __future__ import annotations

import ast
import hashlib
import linecache
from collections.abc import Iterator
from functools import lru_cache
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
        walrus: Names that it binds inside expressions.
        checked: Why it cannot be rewritten; empty when it can, None when nobody has looked.
    """

    def __init__(self, code: CodeType, file: File, node: ast.FunctionDef) -> None:
        self.code = code
        self.checked: str | None = None
        self.walrus = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
        self.file = file
        self.node = node
        self._parents: dict[ast.AST, ast.AST] = {}
        self._exact: dict[tuple[int, int, int, int], ast.expr] = {}
        self._calls_by_end: dict[tuple[int, int], ast.expr] = {}
        for parent in ast.walk(node):
            for child in ast.iter_child_nodes(parent):
                self._parents[child] = parent
                if isinstance(child, ast.expr):
                    self._index(child)
        self._positions = list(code.co_positions()) if hasattr(code, "co_positions") else []
        self.first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self.last_line = node.end_lineno or node.lineno

    def _index(self, expr: ast.expr) -> None:
        end = (expr.end_lineno or 0, expr.end_col_offset or 0)
        self._exact.setdefault((expr.lineno, end[0], expr.col_offset, end[1]), expr)
        if isinstance(expr, ast.Call):
            self._calls_by_end[end] = expr

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
    return tuple(node for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef))
