"""Conditions that dropped code met, as conditions of the rewritten function or constants of its module."""

from __future__ import annotations

import ast
import math
import re
from functools import lru_cache
from typing import Any

from ..authored.modules import reach
from ..provenance import OPAQUE, NodeRef
from .outcome import Facts, Refusal
from .scope import Lifter, Scope
from .values import View

#: Types of values that a text can hold and a comparison can check.
PLAIN = (bool, int, float, str, type(None))


class Conditions(Lifter):
    """Collects what must hold. See `Lifter` for the arguments; `numbers` are those of the region's nodes."""

    def __init__(self, home: View, written: set[str], numbers: frozenset[int] = frozenset()) -> None:
        super().__init__(home, written)
        self.facts = Facts()
        self.numbers = numbers

    def note(self, guard: str) -> None:
        """Notes a condition on the rewritten function's own names."""
        self._guard(guard)

    def present(self, name: str) -> None:
        """Notes that a local must not be None."""
        self._guard(f"{name} is not None")

    def _require(self, expr: ast.expr, scope: Scope, truth: bool | None) -> None:
        """Notes that a condition came out this way."""
        if truth is None:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} cannot be followed")
        if isinstance(expr, ast.BoolOp):
            self._require_parts(expr, scope, truth)
        elif is_not(expr):
            assert isinstance(expr, ast.UnaryOp)
            self._require(expr.operand, scope, not truth)
        elif isinstance(expr, ast.IfExp):
            test = scope.at.truth(expr.test)
            self._require(expr.test, scope, test)
            self._require(expr.body if test else expr.orelse, scope, truth)
        elif isinstance(expr, ast.Name) and expr.id in scope.definitions and self._boolean(expr.id, scope):
            pass
        else:
            self._atom(expr, scope, truth)

    def _boolean(self, name: str, scope: Scope) -> bool:
        """Whether a local was set by a condition, which has then been noted where it was set."""
        value = scope.definitions[name]
        return isinstance(value, (ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant)) or is_not(value)

    def _require_parts(self, expr: ast.BoolOp, scope: Scope, truth: bool) -> None:
        decisive = isinstance(expr.op, ast.Or)
        if truth != decisive:
            for part in expr.values:
                self._require(part, scope, truth)
            return
        told = [part for part in expr.values if scope.at.truth(part) is truth]
        if not told:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} cannot be followed")
        # Any one part decides. One that is a constant of the module costs nothing at run time, one that is
        # guarded already costs nothing more.
        self._require(min(told, key=lambda p: self._cost(p, scope)), scope, truth)

    def _cost(self, part: ast.expr, scope: Scope) -> int:
        if isinstance(part, ast.Name) and part.id in scope.definitions and self._boolean(part.id, scope):
            return 0
        lifted = self._lift(part, scope)
        if lifted is None:
            return 3
        if self._is_constant(lifted):
            return 0
        text = _guard_text(lifted, scope.at.truth(part) is True)
        return 1 if text in self.facts.guards else 2

    def _atom(self, expr: ast.expr, scope: Scope, truth: bool) -> None:
        lifted = self._lift(expr, scope)
        if lifted is None and self._is_made(expr, scope):
            return
        if lifted is None:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} depends on what only that function knows")
        if self._is_constant(lifted):
            for node in ast.walk(expr):
                value = scope.at.value(node) if isinstance(node, ast.Attribute) else OPAQUE
                if isinstance(node, ast.Subscript):
                    value = scope.at.concrete(node)
                if isinstance(value, PLAIN):
                    inner = self._lift(node, scope)  # type: ignore[arg-type]
                    if inner is not None:
                        self._constant(inner, value)
            self._looked_up(lifted)
            return
        self._globals(expr, scope)
        self._guard(_guard_text(lifted, truth))

    def _is_made(self, expr: ast.expr, scope: Scope) -> bool:
        """Whether a comparison with None looks at a tensor that the region itself makes on this path."""
        if not isinstance(expr, ast.Compare) or not isinstance(expr.ops[0], (ast.Is, ast.IsNot)):
            return False
        value = scope.at.value(expr.left)
        return isinstance(value, NodeRef) and value.id in self.numbers

    def _looked_up(self, lifted: ast.expr) -> None:
        """`getattr(self, "x", d)` and `hasattr(self, "x")` read a constant as `self.x` does; one that is not there is
        None."""
        for node in ast.walk(lifted):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("getattr", "hasattr"):
                continue
            base, name = node.args[0], node.args[1]
            above = () if isinstance(base, ast.Name) and base.id == self._root else self._path(base)
            if above is not None and isinstance(name, ast.Constant):
                path = ".".join((*above, str(name.value)))
                value = reach(self.home.call.module, path)
                if isinstance(value, PLAIN):
                    self.facts.constants[path] = value

    def _globals(self, expr: ast.expr, scope: Scope) -> None:
        """Imports the global functions that a guard calls."""
        for node in ast.walk(expr) if scope.at is not self.home else ():
            if not isinstance(node, ast.Name) or self._is_local(node.id, scope):
                continue
            if node.id in scope.at.call.globals:
                self.facts.imports[node.id] = scope.at.call.globals["__name__"]

    def _guard(self, text: str) -> None:
        if not is_expression(text):
            raise Refusal(f"`{text}` is no expression, so it cannot be a condition")
        if text not in self.facts.guards:
            self.facts.guards.append(text)

    def _constant(self, lifted: ast.expr, value: Any) -> None:
        path = self._path(lifted)
        if path is not None:
            self.facts.constants[".".join(path)] = value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.facts.floats[unparse(lifted)] = value

    def _global_number(self, lifted: ast.expr, value: Any, scope: Scope) -> None:
        """A number that a module's global, or an attribute of one, gave: the text can say its name."""
        root = lifted
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or type(value) not in (int, float):
            return
        names, missing = scope.at.call.globals, object()
        held = names.get(root.id, missing)
        if held is missing or self.home.call.globals.get(root.id, held) is not held:
            return
        self.facts.floats[unparse(lifted)] = value
        self.facts.imports.setdefault(root.id, str(names["__name__"]))


@lru_cache(maxsize=1 << 12)
def is_expression(text: str) -> bool:
    """Whether a text is one expression by itself."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def is_not(expr: ast.expr) -> bool:
    return isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not)


_INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}  # fmt: skip  # fmt: skip
_INVERSE_OF_SIZES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Lt: ast.GtE, ast.LtE: ast.Gt,
}  # fmt: skip  # fmt: skip


def _guard_text(lifted: ast.expr, truth: bool) -> str:
    if truth:
        text = unparse(lifted)
        return f"({text})" if isinstance(lifted, (ast.BoolOp, ast.IfExp)) else text
    if isinstance(lifted, ast.Compare) and len(lifted.ops) == 1:
        inverse = _INVERSE.get(type(lifted.ops[0]))
        sizes = all(_is_size_text(side) for side in (lifted.left, *lifted.comparators))
        if inverse is None and sizes:
            inverse = _INVERSE_OF_SIZES.get(type(lifted.ops[0]))
        if inverse is not None:
            return unparse(ast.Compare(lifted.left, [inverse()], lifted.comparators))
    return f"not {wrapped(lifted)}"


def _is_size_text(expr: ast.expr) -> bool:
    if isinstance(expr, ast.Constant):
        return isinstance(expr.value, int)
    return isinstance(expr, ast.Subscript) and isinstance(expr.value, ast.Attribute) and expr.value.attr == "shape"


def unparse(expr: ast.expr) -> str:
    """The expression on one line, strings in double quotes where that needs no escape."""
    text = ast.unparse(expr)
    return re.sub(r"'([^'\"\\\\]*)'", r'"\1"', text) if '"' not in text else text


def literal(value: Any) -> str:
    """A plain value as an expression that gives it again."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def wrapped(expr: ast.expr) -> str:
    """The expression in brackets unless it binds as tightly as a name does."""
    text = unparse(expr)
    return text if isinstance(expr, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"
