"""What must hold for a replacement to mean what the author's code means.

A replacement drops code: a call into a helper, a submodule's forward. That code may have chosen its path by a
condition, or have passed a plain value into an operation. This module goes through the dropped code as it ran and
turns each such choice into one of three: a constant of the module (checked once, when the emitted file is applied),
a condition in terms of the function that is rewritten (written into it as an `if`), or a refusal.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..provenance import OPAQUE, Call, NodeRef
from .flow import reads, target_names
from .values import View, view

_PLAIN = (bool, int, float, str, type(None))
_SHAPE_METHODS = {"size", "dim", "numel", "ndimension"}


class Refusal(Exception):  # noqa: N818 - a refusal is an outcome, not an error
    """Why a place cannot be written in source form."""


@dataclass
class Facts:
    """What was found in the dropped code.

    Attributes:
        guards: Conditions on the rewritten function's own names, in the order in which they were met.
        constants: Path below the rewritten function's `self` -> the value that was read there.
        imports: Names that the guards use -> the module to import them from.
        modules: Path below `self` -> class of a module whose call is dropped.
        floats: Expressions that gave a number to the dropped code -> the number.
    """

    guards: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    modules: dict[str, type] = field(default_factory=dict)
    floats: dict[str, Any] = field(default_factory=dict)


class Scope:
    """The names of one call of dropped code, each in terms of the rewritten function.

    Args:
        at: The call.
        arguments: Parameter -> expression of the rewritten function; None where there is none.
        extra: The expression that a `**kwargs` parameter stands for, with the keys taken out of it by name.
    """

    def __init__(self, at: View, arguments: dict[str, ast.expr | None], extra: ast.expr | None = None) -> None:
        self.at = at
        self.arguments = arguments
        self.extra = extra
        variadic = at.source.node.args.kwarg
        self.extra_name = variadic.arg if variadic is not None else None
        self.definitions: dict[str, ast.expr] = {}


class Inspector:
    """Goes through dropped code.

    Args:
        home: The rewritten function.
        written: Names that the dropped statements of the rewritten function bind.
        literals: The values of the Definition's scalar inputs, which need no guard.
    """

    def __init__(self, home: View, written: set[str], literals: Sequence[Any]) -> None:
        self.home = home
        self.written = written
        self.literals = literals
        self.facts = Facts()
        self._root = home.call.code.co_varnames[0] if home.call.code.co_argcount else ""

    def expression(self, expr: ast.expr, kept: Iterable[ast.expr]) -> None:
        """Goes through an expression of the rewritten function, except for the parts that are kept."""
        scope = Scope(self.home, {})
        self._expression(expr, scope, set(kept))

    def present(self, name: str) -> None:
        """Notes that a local must not be None."""
        self._guard(f"{name} is not None")

    # -- the walk ---------------------------------------------------------------------------------------------

    def _expression(self, expr: ast.expr, scope: Scope, kept: set[ast.expr]) -> None:
        if expr in kept:
            return
        if isinstance(expr, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            raise Refusal(f"{_kind(expr)} in {scope.at.where()} would be dropped")
        if isinstance(expr, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            raise Refusal(f"a comprehension in {scope.at.where()} would be dropped")
        if isinstance(expr, ast.IfExp):
            self._choice(expr, scope, kept)
            return
        if isinstance(expr, (ast.BoolOp, ast.Compare)) or _is_not(expr):
            self._require(expr, scope, scope.at.truth(expr))
            return
        if isinstance(expr, ast.Attribute):
            if self._attribute(expr, scope):
                return
        elif isinstance(expr, ast.Name):
            self._name(expr, scope)
            return
        elif isinstance(expr, ast.Call):
            self._call(expr, scope, kept)
            return
        for child in ast.iter_child_nodes(expr):
            self._parts(child, scope, kept)

    def _parts(self, node: ast.AST, scope: Scope, kept: set[ast.expr]) -> None:
        if isinstance(node, ast.expr):
            self._expression(node, scope, kept)
            return
        for child in ast.iter_child_nodes(node):
            self._parts(child, scope, kept)

    def _choice(self, expr: ast.IfExp, scope: Scope, kept: set[ast.expr]) -> None:
        arms = [self._constant_of(arm, scope) for arm in (expr.body, expr.orelse)]
        if OPAQUE not in arms and arms[0] == arms[1] and type(arms[0]) is type(arms[1]):
            for arm in (expr.body, expr.orelse):
                self._expression(arm, scope, kept)
            return
        truth = scope.at.truth(expr.test)
        self._require(expr.test, scope, truth)
        self._expression(expr.body if truth else expr.orelse, scope, kept)

    def _constant_of(self, expr: ast.expr, scope: Scope) -> Any:
        if isinstance(expr, ast.Constant):
            return expr.value
        lifted = self._lift(expr, scope)
        path = self._path(lifted) if lifted is not None else None
        value = scope.at.value(expr)
        return value if path is not None and path[-1] != "training" and isinstance(value, _PLAIN) else OPAQUE

    def _attribute(self, expr: ast.Attribute, scope: Scope) -> bool:
        """Notes what an attribute of a module gave. True if nothing below it needs a look."""
        base = scope.at.value(expr.value)
        if isinstance(base, NodeRef):
            return False
        if expr.attr == "training" and isinstance(base, nn.Module):
            self._require(expr, scope, scope.at.truth(expr))
            return True
        lifted = self._lift(expr, scope)
        value = scope.at.value(expr)
        if lifted is None or not isinstance(value, _PLAIN):
            return lifted is not None
        self._constant(lifted, value)
        return True

    def _constant(self, lifted: ast.expr, value: Any) -> None:
        path = self._path(lifted)
        if path is not None:
            self.facts.constants[".".join(path)] = value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.facts.floats[unparse(lifted)] = value

    def _name(self, expr: ast.Name, scope: Scope) -> None:
        value = scope.at.value(expr)
        if not isinstance(value, _PLAIN) or expr.id in scope.definitions:
            return
        lifted = self._lift(expr, scope)
        if lifted is None:
            if self._is_local(expr.id, scope) and not self._is_size(expr, scope):
                raise Refusal(f"`{expr.id}` in {scope.at.where()} is {value!r} for a reason that cannot be followed")
            return
        if scope.at is not self.home and isinstance(lifted, (ast.IfExp, ast.BoolOp, ast.Compare, ast.UnaryOp)):
            if self.home.source.parent(lifted) is not None:
                self._expression(lifted, Scope(self.home, {}), set())
                return
        if isinstance(lifted, ast.Constant) or self._is_size(lifted, Scope(self.home, {})):
            return
        if self._is_constant(lifted):
            self._constant(lifted, value)
            return
        text = unparse(lifted)
        if any(value is literal or (type(value) is type(literal) and value == literal) for literal in self.literals):
            if isinstance(value, float):
                self.facts.floats[text] = value
                return
        if value is None:
            self._guard(f"{text} is None")
        elif isinstance(value, bool):
            self._guard(text if value else f"not {_wrapped(lifted)}")
        else:
            self._guard(f"{text} == {value!r}")

    def _is_local(self, name: str, scope: Scope) -> bool:
        code = scope.at.source.code
        return name in code.co_varnames or name in code.co_cellvars

    def _is_size(self, expr: ast.expr, scope: Scope) -> bool:
        """Whether a number comes from the shape of a tensor: the axes of a Definition take care of those."""
        seen: set[str] = set()
        todo: list[ast.AST] = [expr]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim"):
                return True
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _SHAPE_METHODS:
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                todo.extend(_definitions(node.id, scope.at))
            todo.extend(ast.iter_child_nodes(node))
        return False

    def _call(self, expr: ast.Call, scope: Scope, kept: set[ast.expr]) -> None:
        made = scope.at.made_at(expr)
        children = [m.child for m in made if m.child is not None]
        target = scope.at.value(expr.func)
        if isinstance(expr.func, ast.Name) and isinstance(target, FunctionType) and children:
            self._same_function(expr.func, target, scope)
        if target is getattr and (lifted := self._lift(expr, scope)) is not None:
            self._looked_up(lifted)
        if not made and not self._is_harmless(expr, target, scope):
            raise Refusal(f"`{ast.unparse(expr.func)}` is called in {scope.at.where()}, with effects that are not known")
        if len(children) > 1:
            raise Refusal(f"a hook or wrapper runs around `{ast.unparse(expr.func)}` in {scope.at.where()}")
        if isinstance(target, nn.Module):
            self._module(expr.func, target, scope)
        if isinstance(expr.func, ast.Attribute) and not isinstance(target, nn.Module):
            self._expression(expr.func.value, scope, kept)
        if children:
            # What the called function does not look at has no effect, so a plain argument is met where it is read.
            self._inside(children[0], expr, scope)
            lazy: tuple[type, ...] = (ast.Name, ast.Attribute, ast.IfExp, ast.BoolOp, ast.Compare, ast.UnaryOp)
            arguments = [a for a in _arguments(expr) if not isinstance(a, lazy)]
        else:
            off = _has_dropout(scope, made) and any(scope.at.value(a) == 0.0 for a in _arguments(expr)[1:2])
            arguments = _arguments(expr)[: 2 if off else None]
        for argument in arguments:
            self._expression(argument, scope, kept)

    def _is_harmless(self, expr: ast.Call, target: Any, scope: Scope) -> bool:
        if isinstance(expr.func, ast.Attribute):
            base = scope.at.value(expr.func.value)
            if isinstance(base, NodeRef) or expr.func.attr in _SHAPE_METHODS:
                return not expr.func.attr.endswith("_")
        return scope.at.concrete(expr) is not OPAQUE or _from_torch(target)

    def _same_function(self, name: ast.Name, target: FunctionType, scope: Scope) -> None:
        """A function held by a local may be another one the next time."""
        if not self._is_local(name.id, scope):
            return
        lifted = self._lift(name, scope)
        if lifted is None or self._is_constant(lifted):
            if lifted is None:
                raise Refusal(f"`{name.id}` in {scope.at.where()} holds a function that cannot be followed")
            return
        if "<" in target.__qualname__ or "." in target.__qualname__:
            raise Refusal(f"`{name.id}` in {scope.at.where()} holds {target.__qualname__}, which cannot be imported")
        self.facts.imports[target.__name__] = target.__module__
        self._guard(f"{unparse(lifted)} is {target.__name__}")

    def _module(self, func: ast.expr, module: nn.Module, scope: Scope) -> None:
        lifted = self._lift(func, scope)
        path = self._path(lifted) if lifted is not None else None
        if path is None:
            raise Refusal(f"the module called in {scope.at.where()} is no part of the rewritten function's own")
        self.facts.modules[".".join(path)] = type(module)

    def _inside(self, child: Call, expr: ast.Call, scope: Scope) -> None:
        """Goes through a dropped call's own code."""
        at = view(self.home.provenance, child)
        if at is None or child.is_generator:
            raise Refusal(f"the source of {child.code.co_name} is not known")
        inner = self._bind(at, expr, scope)
        if "/torch/nn/modules/" in child.code.co_filename:
            self._torch_module(at, inner)
        else:
            self._block(at.source.node.body, inner)

    def _torch_module(self, at: View, scope: Scope) -> None:
        module = at.call.module
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p == 0.0:
                self._constant(_member(scope, "p"), 0.0)
            else:
                self._require(_parse("self.training"), scope, module.training)
            return
        for node in ast.walk(at.source.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and at.ran_at(node):
                value, lifted = at.value(node), self._lift(node, scope)
                if isinstance(value, (int, float)) and lifted is not None and node.attr != "training":
                    self._constant(lifted, value)

    def _block(self, block: Sequence[ast.stmt], scope: Scope) -> bool:
        """Goes through the statements that ran. True when one of them returned."""
        for statement in block:
            if not scope.at.ran(statement) and not isinstance(statement, (ast.FunctionDef, ast.Pass)):
                return True
            if self._statement(statement, scope):
                return True
        return False

    def _statement(self, statement: ast.stmt, scope: Scope) -> bool:
        if isinstance(statement, ast.If):
            truth = self._taken(statement, scope)
            self._require(statement.test, scope, truth)
            return self._block(statement.body if truth else statement.orelse, scope)
        if isinstance(statement, ast.Assert):
            self._require(statement.test, scope, True)
        elif isinstance(statement, ast.Return):
            if statement.value is not None:
                self._expression(statement.value, scope, set())
            return True
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            self._assign(statement, scope)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            pass
        elif not isinstance(statement, ast.Pass):
            raise Refusal(f"{_kind(statement)} in {scope.at.where()} would be dropped")
        return False

    def _assign(self, statement: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        if statement.value is None:
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        self._expression(statement.value, scope, set())
        for target in targets:
            names = target_names(target)
            if names is None:
                if not self._fills_own_dict(target, scope):
                    raise Refusal(f"an assignment to `{ast.unparse(target)}` in {scope.at.where()} would be dropped")
                continue
            for name in names:
                scope.arguments[name] = None
                scope.definitions.pop(name, None)
            if len(names) == 1 and isinstance(target, ast.Name):
                lifted = self._lift(statement.value, scope, but=names[0])
                scope.arguments[names[0]] = lifted
                scope.definitions[names[0]] = statement.value

    def _fills_own_dict(self, target: ast.expr, scope: Scope) -> bool:
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        return isinstance(scope.definitions.get(target.value.id), ast.Dict)

    def _taken(self, statement: ast.If, scope: Scope) -> bool:
        first, last = statement.body[0], statement.body[-1]
        if first.lineno > (statement.test.end_lineno or statement.test.lineno):
            end = last.end_lineno or last.lineno
            return any(first.lineno <= step.line <= end for step in scope.at.call.steps)
        truth = scope.at.truth(statement.test)
        if truth is None:
            raise Refusal(f"`if {ast.unparse(statement.test)}` in {scope.at.where()} cannot be followed")
        return truth

    # -- conditions -------------------------------------------------------------------------------------------

    def _require(self, expr: ast.expr, scope: Scope, truth: bool | None) -> None:
        """Notes that a condition came out this way."""
        if truth is None:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} cannot be followed")
        if isinstance(expr, ast.BoolOp):
            self._require_parts(expr, scope, truth)
        elif _is_not(expr):
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
        return isinstance(value, (ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant)) or _is_not(value)

    def _require_parts(self, expr: ast.BoolOp, scope: Scope, truth: bool) -> None:
        decisive = isinstance(expr.op, ast.Or)
        if truth != decisive:
            for part in expr.values:
                self._require(part, scope, truth)
            return
        told = [part for part in expr.values if scope.at.truth(part) is truth]
        if not told:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} cannot be followed")
        # Any one part decides; one that is a constant of the module costs nothing at run time, and one that is
        # already guarded costs nothing more.
        failed: Refusal | None = None
        for part in sorted(told, key=lambda p: self._cost(p, scope)):
            try:
                self._require(part, scope, truth)
            except Refusal as refusal:
                failed = refusal
            else:
                return
        raise failed or Refusal("no part of the condition can be followed")

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
        if lifted is None:
            raise Refusal(f"`{ast.unparse(expr)}` in {scope.at.where()} depends on what only that function knows")
        if self._is_constant(lifted):
            for node in ast.walk(expr):
                value = scope.at.value(node) if isinstance(node, ast.Attribute) else OPAQUE
                if isinstance(value, _PLAIN):
                    inner = self._lift(node, scope)  # type: ignore[arg-type]
                    if inner is not None:
                        self._constant(inner, value)
            self._looked_up(lifted)
            return
        self._globals(expr, scope)
        self._guard(_guard_text(lifted, truth))

    def _looked_up(self, lifted: ast.expr) -> None:
        """`getattr(self, "x", d)` and `hasattr(self, "x")` read a constant as `self.x` does."""
        for node in ast.walk(lifted):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                base, name = node.args[0], node.args[1]
                path = self._path(base)
                if path is not None and isinstance(name, ast.Constant):
                    held = self.home.call.module
                    for part in path:
                        held = getattr(held, part)
                    value = getattr(held, str(name.value), OPAQUE)
                    if isinstance(value, _PLAIN):
                        self.facts.constants[".".join((*path, str(name.value)))] = value

    def _globals(self, expr: ast.expr, scope: Scope) -> None:
        """Imports the global functions that a guard calls."""
        for node in ast.walk(expr):
            if isinstance(node, ast.Name) and not self._is_local(node.id, scope) and node.id in scope.at.call.globals:
                if scope.at is not self.home:
                    self.facts.imports[node.id] = scope.at.call.globals["__name__"]

    def _guard(self, text: str) -> None:
        if text not in self.facts.guards:
            self.facts.guards.append(text)

    # -- names of the rewritten function ------------------------------------------------------------------------

    def _lift(self, expr: ast.expr, scope: Scope, but: str = "") -> ast.expr | None:
        """The expression in terms of the rewritten function, None if it has none there."""
        taken = self._taken_keyword(expr, scope)
        if taken is not None:
            return taken
        if scope.at is self.home:
            return expr if not reads(expr) & self.written and not _has_walrus(expr) else None
        if isinstance(expr, ast.Name):
            return self._lift_name(expr, scope, but)
        if isinstance(expr, ast.Constant):
            return expr
        if isinstance(expr, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, ast.Dict)):
            return None
        if any(made.last > made.first for made in scope.at.made_at(expr)):
            return None
        lifted = copy.copy(expr)
        for name, value in ast.iter_fields(expr):
            if isinstance(value, ast.expr):
                inner = self._lift(value, scope, but)
                if inner is None:
                    return None
                setattr(lifted, name, inner)
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                parts = [self._lift(part, scope, but) for part in value]
                if None in parts:
                    return None
                setattr(lifted, name, parts)
            elif isinstance(value, list) and value and isinstance(value[0], (ast.keyword, ast.comprehension)):
                return None
        return lifted

    def _lift_name(self, expr: ast.Name, scope: Scope, but: str) -> ast.expr | None:
        if expr.id == but:
            return None
        if expr.id in scope.arguments:
            return scope.arguments[expr.id]
        if self._is_local(expr.id, scope):
            return None
        return expr

    def _taken_keyword(self, expr: ast.expr, scope: Scope) -> ast.expr | None:
        """`kwargs.get("x", d)` of a `**kwargs` parameter, in terms of what the rewritten function passes on."""
        if scope.at is self.home or scope.extra_name is None or not isinstance(expr, ast.Call):
            return None
        func = expr.func
        if not (isinstance(func, ast.Attribute) and func.attr == "get" and isinstance(func.value, ast.Name)):
            return None
        if func.value.id != scope.extra_name or not isinstance(expr.args[0], ast.Constant):
            return None
        key = expr.args[0].value
        named = scope.arguments.get(f"**{key}")
        if named is not None:
            return named
        if scope.extra is None:
            return expr.args[1] if len(expr.args) > 1 else ast.Constant(None)
        lifted = ast.Call(ast.Attribute(scope.extra, "get", ast.Load()), list(expr.args), [])
        return ast.fix_missing_locations(lifted)

    def _bind(self, at: View, expr: ast.Call, scope: Scope) -> Scope:
        """The parameters of a called function in terms of the rewritten function."""
        spec = at.source.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        positional: list[ast.expr | None] = []
        target = scope.at.value(expr.func)
        if isinstance(target, nn.Module):
            positional.append(self._lift(expr.func, scope))
        elif names and at.call.module is not None and isinstance(expr.func, ast.Attribute):
            if scope.at.value(expr.func.value) is at.call.module:
                positional.append(self._lift(expr.func.value, scope))
        extra: ast.expr | None = None
        for argument in expr.args:
            if isinstance(argument, ast.Starred):
                raise Refusal(f"`*{ast.unparse(argument.value)}` in {scope.at.where()} cannot be followed")
            positional.append(self._lift(argument, scope))
        arguments: dict[str, ast.expr | None] = dict(zip(names, positional, strict=False))
        known = {*names, *(a.arg for a in spec.kwonlyargs)}
        for keyword in expr.keywords:
            lifted = self._lift(keyword.value, scope)
            if keyword.arg is None:
                if extra is not None or not isinstance(lifted, ast.Name):
                    raise Refusal(f"`**{ast.unparse(keyword.value)}` in {scope.at.where()} cannot be followed")
                extra = lifted
            else:
                arguments[keyword.arg if keyword.arg in known else f"**{keyword.arg}"] = lifted
        for name, default in _defaults(spec):
            if name not in arguments:
                arguments[name] = default if extra is None else _get(extra, name, default)
        inner = Scope(at, arguments, extra)
        self._check_binding(inner)
        return inner

    def _check_binding(self, scope: Scope) -> None:
        """A wrapper between the call and the function may have changed the arguments."""
        variadic = {a.arg for a in (scope.at.source.node.args.vararg, scope.at.source.node.args.kwarg) if a}
        for name in scope.at.entry:
            if name not in scope.arguments and name not in variadic:
                raise Refusal(f"a wrapper around {scope.at.where()} passes `{name}` itself")

    def _path(self, lifted: ast.expr) -> tuple[str, ...] | None:
        """The attribute path below the rewritten function's `self`."""
        parts: list[str] = []
        while True:
            if isinstance(lifted, ast.Attribute):
                parts.append(lifted.attr)
                lifted = lifted.value
            elif isinstance(lifted, ast.Subscript) and isinstance(lifted.slice, ast.Constant):
                parts.append(str(lifted.slice.value))
                lifted = lifted.value
            else:
                break
        is_root = isinstance(lifted, ast.Name) and lifted.id == self._root and parts
        return tuple(reversed(parts)) if is_root else None

    def _is_constant(self, lifted: ast.expr) -> bool:
        """Whether nothing in it can change between two calls of one module."""
        if self._path(lifted) is not None:
            return not any(isinstance(n, ast.Attribute) and n.attr == "training" for n in ast.walk(lifted))
        if isinstance(lifted, ast.Name):
            return lifted.id == self._root or lifted.id not in self.home.source.code.co_varnames
        return all(self._is_constant(part) for part in ast.iter_child_nodes(lifted) if isinstance(part, ast.expr))


def _kind(node: ast.AST) -> str:
    names = {
        "For": "a loop", "While": "a loop", "With": "a with block", "Try": "a try block", "Expr": "a call for its effect",
        "NamedExpr": "a walrus", "Lambda": "a lambda", "Raise": "a raise", "AugAssign": "an augmented assignment",
        "FunctionDef": "a nested function",
    }  # fmt: skip
    name = type(node).__name__
    return f"{names.get(name, name)} at line {getattr(node, 'lineno', 0)}"


def _has_walrus(expr: ast.expr) -> bool:
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(expr))


def _is_not(expr: ast.expr) -> bool:
    return isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not)


_INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_INVERSE_OF_SIZES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Lt: ast.GtE, ast.LtE: ast.Gt,
}  # fmt: skip


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
    return f"not {_wrapped(lifted)}"


def _is_size_text(expr: ast.expr) -> bool:
    if isinstance(expr, ast.Constant):
        return isinstance(expr.value, int)
    return isinstance(expr, ast.Subscript) and isinstance(expr.value, ast.Attribute) and expr.value.attr == "shape"


def unparse(expr: ast.expr) -> str:
    """The expression on one line, strings in double quotes where that needs no escape."""
    text = ast.unparse(expr)
    return re.sub(r"'([^'\"\\\\]*)'", r'"\1"', text) if '"' not in text else text


def _wrapped(expr: ast.expr) -> str:
    text = unparse(expr)
    return text if isinstance(expr, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


def _arguments(expr: ast.Call) -> list[ast.expr]:
    return [*expr.args, *(keyword.value for keyword in expr.keywords)]


def _defaults(spec: ast.arguments) -> list[tuple[str, ast.expr | None]]:
    names = [*spec.posonlyargs, *spec.args]
    found: list[tuple[str, ast.expr | None]] = []
    if spec.defaults:
        found += [(a.arg, d) for a, d in zip(names[-len(spec.defaults) :], spec.defaults, strict=True)]
    found += [(a.arg, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None]
    return [(name, default if isinstance(default, ast.Constant) else None) for name, default in found]


def _get(extra: ast.expr, name: str, default: ast.expr | None) -> ast.expr | None:
    if default is None:
        return None
    arguments = [ast.Constant(name)] if isinstance(default, ast.Constant) and default.value is None else None
    call = ast.Call(
        ast.Attribute(extra, "get", ast.Load()), list(arguments or [ast.Constant(name), default]), []
    )
    return ast.fix_missing_locations(call)


def _definitions(name: str, at: View) -> list[ast.expr]:
    """The right-hand sides from which a local was set."""
    found: list[ast.expr] = []
    for node in ast.walk(at.source.node):
        if isinstance(node, ast.Assign) and any(name in (target_names(t) or ()) for t in node.targets):
            found.append(node.value)
    return found


def _has_dropout(scope: Scope, made: Sequence[Any]) -> bool:
    nodes = (scope.at.provenance._nodes.get(m.first) for m in made)
    return any(node is not None and node.target is torch.ops.aten.dropout.default for node in nodes)


def _from_torch(target: Any) -> bool:
    module = getattr(target, "__module__", "") or ""
    return module.split(".")[0] in ("torch", "math", "builtins", "_operator") and callable(target)


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _member(scope: Scope, name: str) -> ast.expr:
    owner = scope.arguments.get("self")
    if owner is None:
        raise Refusal(f"the module called in {scope.at.where()} is no part of the rewritten function's own")
    return ast.fix_missing_locations(ast.Attribute(owner, name, ast.Load()))
