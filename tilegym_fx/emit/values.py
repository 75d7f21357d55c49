"""What the expressions of one recorded call evaluated to."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from ..authored.source import FunctionSource, function_source, walk
from ..provenance import OPAQUE, Call, NodeRef, Provenance

#: Functions and methods that only look.
_HARMLESS = {
    "getattr", "hasattr", "isinstance", "issubclass", "callable", "type", "len", "int", "float", "bool",
    "str", "abs", "max", "min", "round", "tuple", "sqrt", "get", "size", "dim", "numel", "ndimension",
    "startswith", "endswith",
}  # fmt: skip
_PREDICATE = re.compile(r"_?(is|use|uses|has|should|can|needs)_")


@dataclass(frozen=True)
class Made:
    """What one expression of a call made: a run of graph nodes, through a child call or directly."""

    expr: ast.expr | None
    first: int
    last: int
    child: Call | None


class View:
    """One recorded call together with the source of its function.

    Args:
        provenance: The record that the call is part of.
        call: The call.
        source: The source of its function.
    """

    def __init__(self, provenance: Provenance, call: Call, source: FunctionSource) -> None:
        self.provenance = provenance
        self.call = call
        self.source = source
        self._cache: dict[ast.expr, Any] = {}
        self._numbers: dict[ast.AST, frozenset[int]] = {}

    @cached_property
    def made(self) -> list[Made]:
        """Everything the call made, in order."""
        found = [
            Made(self.source.expr_at(child.parent_offset), child.order, child.order_end, child)
            for child in self.call.children
        ]
        for number in self.provenance.direct(self.call):
            origin = self.provenance._origins[number]
            found.append(Made(self.source.expr_at(origin.offset), number, number + 1, None))
        return sorted(found, key=lambda made: (made.first, made.last))

    def expression_of(self, number: int) -> ast.expr | None:
        """The expression of this function that was running when a node was made."""
        return next((made.expr for made in self.made if made.first <= number < made.last), None)

    @cached_property
    def _by_expr(self) -> dict[ast.expr, list[Made]]:
        found: dict[ast.expr, list[Made]] = {}
        for made in self.made:
            if made.expr is not None:
                found.setdefault(made.expr, []).append(made)
        return found

    def made_at(self, expr: ast.expr) -> list[Made]:
        """What this very expression made, not what its parts made."""
        return self._by_expr.get(expr, [])

    def made_in(self, node: ast.AST) -> Iterator[Made]:
        """What a node of the tree and everything inside it made."""
        by_expr = self._by_expr
        for part in walk(node):
            yield from by_expr.get(part, ())  # type: ignore[call-overload]

    def numbers_in(self, node: ast.AST) -> frozenset[int]:
        """The numbers of the graph nodes made by a node of the tree and everything inside it."""
        found = self._numbers.get(node)
        if found is None:
            found = frozenset(n for made in self.made_in(node) for n in range(made.first, made.last))
            self._numbers[node] = found
        return found

    @cached_property
    def unplaced(self) -> set[int]:
        """Numbers of graph nodes that this call made at no expression that could be told."""
        return {n for made in self.made if made.expr is None for n in range(made.first, made.last)}

    @cached_property
    def _envs(self) -> list[dict[str, Any]]:
        envs: list[dict[str, Any]] = []
        env: dict[str, Any] = {}
        for step in self.call.steps:
            env = {**env, **step.changes}
            for name in step.gone:
                env.pop(name, None)
            envs.append(env)
        return envs

    def _steps_in(self, statement: ast.stmt) -> list[int]:
        first, last = _lines(statement)
        return [i for i, step in enumerate(self.call.steps) if first <= step.line <= last]

    def ran(self, statement: ast.stmt) -> bool:
        """Whether a line of this statement (its header, for one with a block) ran."""
        return bool(self._steps_in(statement))

    def ran_at(self, node: ast.AST) -> bool:
        """Whether the statement that a node lies in ran."""
        statement = self.source.statement(node)
        return statement is not None and self.ran(statement)

    def before(self, statement: ast.stmt) -> dict[str, Any]:
        """The locals before a statement ran."""
        steps = self._steps_in(statement)
        return self._envs[steps[0]] if steps else {}

    def after(self, statement: ast.stmt) -> dict[str, Any]:
        """The locals after a statement ran."""
        steps = self._steps_in(statement)
        return self._envs[steps[-1] + 1] if steps and steps[-1] + 1 < len(self._envs) else {}

    @property
    def entry(self) -> dict[str, Any]:
        """The arguments."""
        return self._envs[0] if self._envs else {}

    def value(self, expr: ast.expr) -> Any:
        """What an expression evaluated to: a `NodeRef`, a tuple, a plain value, or OPAQUE."""
        if expr not in self._cache:
            self._cache[expr] = OPAQUE
            found = self._evaluate(expr)
            self._cache[expr] = self.provenance.real(found) if isinstance(found, nn.Module) else found
        return self._cache[expr]

    def _evaluate(self, expr: ast.expr) -> Any:
        if isinstance(expr, ast.Constant):
            return expr.value
        if isinstance(expr, ast.Name):
            return self._name(expr)
        if isinstance(expr, (ast.Starred, ast.Slice)):
            return OPAQUE  # a part of the expression around it, no expression of its own
        if isinstance(expr, (ast.Tuple, ast.List)):
            return tuple(self.value(element) for element in expr.elts)
        if isinstance(expr, ast.NamedExpr):
            return self.value(expr.value)
        if isinstance(expr, ast.IfExp):
            test = self.truth(expr.test)
            return OPAQUE if test is None else self.value(expr.body if test else expr.orelse)
        if self.made_at(expr):
            return self._made_value(expr)
        if isinstance(expr, ast.Attribute):
            return self._attribute(self.value(expr.value), expr.attr)
        if isinstance(expr, ast.Subscript):
            base, at = self.value(expr.value), getattr(expr.slice, "value", None)
            if not isinstance(base, (tuple, nn.ModuleList)) or not isinstance(at, int):
                return OPAQUE
            return base[at] if -len(base) <= at < len(base) else OPAQUE
        return self._plain(self.concrete(expr))

    def _name(self, expr: ast.Name) -> Any:
        statement = self.source.statement(expr)
        assert statement is not None
        if expr.id in self.source.walrus and any(
            isinstance(n, ast.NamedExpr) and n.target.id == expr.id for n in walk(statement)
        ):
            return OPAQUE
        env = self.before(statement)
        if expr.id in env:
            return env[expr.id]
        if expr.id in self.source.code.co_varnames or expr.id in self.source.code.co_cellvars:
            return OPAQUE
        return self.call.globals.get(expr.id, getattr(builtins, expr.id, OPAQUE))

    def importable(self, expr: ast.expr) -> tuple[str, str, Any] | None:
        """Name, module and value of a mapping that is a global of this function's module, or a closure's."""
        if not isinstance(expr, ast.Name):
            return None
        held = self.call.globals.get(expr.id)
        if held is None and expr.id in self.call.code.co_freevars:
            held = _closed_over(self.call, expr.id)
        names = [name for name, value in self.call.globals.items() if value is held]
        return (names[0], str(self.call.globals["__name__"]), held) if names and isinstance(held, Mapping) else None

    def _made_value(self, expr: ast.expr) -> Any:
        made = self.made_at(expr)
        children = [m.child for m in made if m.child is not None]
        if children:
            return children[0].returned if len(children) == 1 else OPAQUE
        numbers = [m.first for m in made]
        nodes = [self.provenance.resolve(NodeRef(n)) for n in numbers]
        items = [n for n, node in zip(numbers, nodes, strict=True) if node is not None and _is_getitem(node)]
        if items:
            return tuple(NodeRef(n) for n in items)
        last = nodes[-1]
        if last is None or not isinstance(last.meta.get("val"), torch.Tensor):
            return OPAQUE
        return NodeRef(numbers[-1])

    def _attribute(self, base: Any, name: str) -> Any:
        if isinstance(base, NodeRef):
            node = self.provenance.resolve(base)
            fake = node.meta.get("val") if node is not None else None
            if isinstance(fake, torch.Tensor) and name in ("shape", "dtype", "ndim", "device"):
                return self._plain(getattr(fake, name))
            return OPAQUE
        if base is OPAQUE or isinstance(base, (tuple, dict)):
            return OPAQUE
        try:
            held = getattr(base, name)
        except AttributeError:
            return OPAQUE
        if isinstance(held, torch.Tensor):
            return self.provenance.tensor(held) or OPAQUE
        return held

    def _plain(self, held: Any) -> Any:
        if isinstance(held, torch.Tensor):
            return OPAQUE
        if isinstance(held, (tuple, list)):
            return tuple(self._plain(item) for item in held)
        return held

    def concrete(self, expr: ast.expr) -> Any:
        """The value of an expression that makes no graph node and calls nothing but harmless functions."""
        if any(True for _ in self._graph_makers(expr)):
            return OPAQUE
        statement = self.source.statement(expr)
        env = self.before(statement) if statement is not None else {}
        names = {n.id for n in walk(expr) if isinstance(n, ast.Name)}
        bound = {name: self._live(env[name]) for name in names if name in env}
        if any(_has_opaque(value) for value in bound.values()):
            return OPAQUE
        if not all(_is_harmless(node) for node in walk(expr)):
            return OPAQUE
        program = _compiled(expr)
        if program is None:
            return OPAQUE
        try:
            return eval(program, dict(self.call.globals), bound)
        except (NameError, TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError):
            return OPAQUE

    def _graph_makers(self, expr: ast.expr) -> Iterator[Made]:
        for made in self.made_in(expr):
            if made.last > made.first:
                yield made

    def _live(self, value: Any) -> Any:
        if isinstance(value, NodeRef):
            node = self.provenance.resolve(value)
            fake = node.meta.get("val") if node is not None else None
            return fake if isinstance(fake, torch.Tensor) else OPAQUE
        if isinstance(value, nn.Module):
            return self.provenance.real(value)
        if isinstance(value, tuple):
            return tuple(self._live(item) for item in value)
        if isinstance(value, dict):
            return {key: self._live(item) for key, item in value.items()}
        return value

    def truth(self, expr: ast.expr) -> bool | None:
        """Whether a condition held; None if that cannot be told."""
        if isinstance(expr, ast.Call) and self.made_at(expr):
            returned = self.value(expr)
            return None if returned is OPAQUE or isinstance(returned, NodeRef) else bool(returned)
        if isinstance(expr, ast.BoolOp):
            parts = [self.truth(part) for part in expr.values]
            decisive = isinstance(expr.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not):
            inner = self.truth(expr.operand)
            return None if inner is None else not inner
        found = self.concrete(expr)
        if found is OPAQUE or isinstance(found, torch.Tensor):
            return None
        return bool(found)

    def where(self) -> str:
        """File, line and function for a message."""
        code = self.call.code
        return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


@lru_cache(maxsize=1 << 12)
def _compiled(expr: ast.expr) -> CodeType | None:
    """An expression as code; None for what is only a part of one, such as a starred argument or a slice."""
    try:
        return compile(ast.Expression(expr), "<condition>", "eval")
    except (SyntaxError, ValueError, TypeError):
        return None


def view(provenance: Provenance, call: Call) -> View | None:
    """The view of a call, None if its function has no source."""
    cache: dict[int, View | None] = provenance.__dict__.setdefault("_views", {})
    if call.index not in cache:
        source = function_source(call.code)
        cache[call.index] = View(provenance, call, source) if source is not None else None
    return cache[call.index]


def _closed_over(call: Call, name: str) -> Any:
    """The value of a free variable of a method."""
    for base in type(call.module).__mro__:
        for held in vars(base).values():
            if getattr(held, "__code__", None) is call.code:
                return dict(zip(call.code.co_freevars, held.__closure__, strict=True))[name].cell_contents
    return None


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, or of its header if it has a block."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _is_harmless(node: ast.AST) -> bool:
    """Whether running a part of an expression once more changes nothing."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        return name in _HARMLESS or _PREDICATE.match(name) is not None
    return not isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.comprehension))


def _has_opaque(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_has_opaque(item) for item in value)
    return value is OPAQUE


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
