"""What must hold for a replacement to mean what the author's code means.

A replacement drops code: a call into a helper, a submodule's forward. That code may have chosen its path by a
condition, or have passed a plain value into an operation. This module goes through the dropped code as it
ran and turns each such choice into one of three: a constant of the module (checked once, when the emitted
file is applied), a condition in terms of the function that is rewritten (written into it as an `if`), or a
refusal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..authored.functions import digest_of
from ..authored.modules import hooks_of, is_still
from ..authored.source import children
from ..provenance import OPAQUE, Call, NodeRef
from .conditions import PLAIN, Conditions, is_not, literal, unparse, wrapped
from .dropped import name_of
from .flow import target_names
from .outcome import Refusal
from .owner import grad_switch
from .regions import writes_in_place
from .scope import SHAPE_METHODS, Scope
from .values import View, view

#: Functions that choose how something is computed and not what; inside, nothing needs to be followed.
_HOW_NOT_WHAT = {("transformers.integrations.moe", "_grouped_mm")}
_CHOICES = (ast.IfExp, ast.BoolOp, ast.Compare, ast.UnaryOp)


class Inspector(Conditions):
    """Goes through dropped code.

    Args:
        home: The rewritten function.
        written: Names that the dropped statements of the rewritten function bind.
        literals: The values of the Definition's scalar inputs, which need no guard.
        numbers: The numbers of the region's nodes.
    """

    def __init__(
        self, home: View, written: set[str], literals: Sequence[Any], numbers: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(home, written, numbers)
        self.literals = literals

    def expression(self, expr: ast.expr, kept: Iterable[ast.expr]) -> None:
        """Goes through an expression of the rewritten function, except for the parts that are kept."""
        scope = Scope(self.home, {})
        self._expression(expr, scope, set(kept))

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
        if isinstance(expr, (ast.BoolOp, ast.Compare)) or is_not(expr):
            self._require(expr, scope, scope.at.truth(expr))
            return
        if isinstance(expr, ast.Attribute):
            if self._attribute(expr, scope):
                return
        elif isinstance(expr, ast.Subscript) and self._item(expr, scope):
            return
        elif isinstance(expr, ast.Name):
            self._name(expr, scope)
            return
        elif isinstance(expr, ast.Call):
            self._call(expr, scope, kept)
            return
        for child in children(expr):
            self._parts(child, scope, kept)

    def _parts(self, node: ast.AST, scope: Scope, kept: set[ast.expr]) -> None:
        if isinstance(node, ast.expr):
            self._expression(node, scope, kept)
            return
        for child in children(node):
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
        return value if path is not None and path[-1] != "training" and isinstance(value, PLAIN) else OPAQUE

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
        if lifted is None or not isinstance(value, PLAIN):
            return lifted is not None
        self._constant(lifted, value)
        self._global_number(lifted, value, scope)
        return True

    def _item(self, expr: ast.Subscript, scope: Scope) -> bool:
        """Notes what an item of the module's own (`self.cfg["eps"]`) gave. True if nothing below it needs a look."""
        lifted = self._lift(expr, scope)
        path = self._path(lifted) if lifted is not None else None
        value = scope.at.concrete(expr) if path is not None else OPAQUE
        if lifted is None or path is None or not isinstance(value, PLAIN):
            return False
        if not is_still(self.home.call.module, ".".join(path), value):
            raise Refusal(f"`{unparse(lifted)}` is no path that an emitted file can compare")
        self._constant(lifted, value)
        return True

    def _name(self, expr: ast.Name, scope: Scope) -> None:
        value = scope.at.value(expr)
        if not isinstance(value, PLAIN) or expr.id in scope.definitions:
            return
        lifted = self._lift(expr, scope)
        if lifted is None:
            if self._is_local(expr.id, scope) and not self._is_size(expr, scope):
                raise Refusal(f"`{expr.id}` in {scope.at.where()} is {value!r} for a reason that cannot be followed")
            return
        if scope.at is not self.home and isinstance(lifted, _CHOICES) and self.home.source.parent(lifted):
            self._expression(lifted, Scope(self.home, {}), set())
            return
        if isinstance(lifted, ast.Constant) or self._is_size(lifted, Scope(self.home, {})):
            return
        if self._is_constant(lifted):
            self._constant(lifted, value)
            self._global_number(lifted, value, scope)
            return
        if isinstance(value, float) and value in self.literals:
            self.facts.floats[unparse(lifted)] = value
            return
        if value is None:
            self._guard(f"{wrapped(lifted)} is None")
        elif isinstance(value, bool):
            self._guard(wrapped(lifted) if value else f"not {wrapped(lifted)}")
        elif value != value:
            raise Refusal(f"`{expr.id}` in {scope.at.where()} is no number, which nothing equals")
        else:
            self._guard(f"{wrapped(lifted)} == {literal(value)}")

    def _call(self, expr: ast.Call, scope: Scope, kept: set[ast.expr]) -> None:
        if _is_lookup(expr):
            return  # what it finds is looked at where it is called
        made = scope.at.made_at(expr)
        inner = [m.child for m in made if m.child is not None]
        target = scope.at.value(expr.func)
        if isinstance(expr.func, ast.Name) and isinstance(target, FunctionType) and inner:
            self._same_function(expr.func, target, scope)
        if target is getattr and (lifted := self._lift(expr, scope)) is not None:
            self._looked_up(lifted)
        if not made and not self._is_harmless(expr, target, scope):
            raise Refusal(
                f"`{ast.unparse(expr.func)}` is called in {scope.at.where()}, with effects that are not known"
            )
        if len(inner) > 1:
            raise Refusal(f"a hook or wrapper runs around `{ast.unparse(expr.func)}` in {scope.at.where()}")
        if isinstance(target, nn.Module):
            self._module(expr.func, target, scope)
        if isinstance(expr.func, ast.Attribute) and not isinstance(target, nn.Module):
            self._expression(expr.func.value, scope, kept)
        if isinstance(target, FunctionType) and (target.__module__, target.__qualname__) in _HOW_NOT_WHAT:
            arguments = _arguments(expr)
        elif inner:
            # What the called function does not look at has no effect, so a plain argument is met where it
            # is read.
            self._inside(inner[0], expr, scope)
            lazy: tuple[type, ...] = (
                ast.Name,
                ast.Attribute,
                ast.IfExp,
                ast.BoolOp,
                ast.Compare,
                ast.UnaryOp,
            )
            arguments = [a for a in _arguments(expr) if not isinstance(a, lazy)]
        else:
            off = _has_dropout(scope, made) and any(scope.at.value(a) == 0.0 for a in _arguments(expr)[1:2])
            arguments = _arguments(expr)[: 2 if off else None]
        for argument in arguments:
            self._expression(argument, scope, kept)

    def _is_harmless(self, expr: ast.Call, target: Any, scope: Scope) -> bool:
        if isinstance(expr.func, ast.Attribute):
            base = scope.at.value(expr.func.value)
            if isinstance(base, NodeRef) or expr.func.attr in SHAPE_METHODS:
                return not expr.func.attr.endswith("_")
        return scope.at.concrete(expr) is not OPAQUE or _from_torch(target)

    def _same_function(self, name: ast.Name, target: FunctionType, scope: Scope) -> None:
        """A function held by a local may be another one the next time."""
        if not self._is_local(name.id, scope):
            return
        if self._looked_up_function(scope.definitions.get(name.id), target, scope):
            return
        lifted = self._lift(name, scope)
        if lifted is None or self._is_constant(lifted):
            if lifted is None:
                raise Refusal(f"`{name.id}` in {scope.at.where()} holds a function that cannot be followed")
            return
        if "<" in target.__qualname__ or "." in target.__qualname__:
            raise Refusal(f"`{name.id}` in {scope.at.where()} holds {target.__qualname__}, which cannot be imported")
        self.facts.imports[target.__name__] = target.__module__
        self._guard(f"{wrapped(lifted)} is {target.__name__}")

    def _looked_up_function(self, lookup: ast.expr | None, target: FunctionType, scope: Scope) -> bool:
        """Whether a function came out of a registry of transformers, under a key that a guard can compare."""
        if lookup is None or not _is_lookup(lookup):
            return False
        assert isinstance(lookup, ast.Call)
        assert isinstance(lookup.func, ast.Attribute)
        registry, key = lookup.func.value, self._lift(lookup.args[0], scope)
        found = scope.at.importable(registry)
        if found is None or key is None or found[2].get(scope.at.value(lookup.args[0])) is not target:
            return False
        name, module, _ = found
        self.facts.imports |= {name: module, target.__name__: target.__module__}
        self._guard(f"{name}.get({unparse(key)}) is {target.__name__}")
        return True

    def _module(self, func: ast.expr, module: nn.Module, scope: Scope) -> None:
        lifted = self._lift(func, scope)
        path = self._path(lifted) if lifted is not None else None
        if path is None:
            raise Refusal(f"the module called in {scope.at.where()} is no part of the rewritten function's own")
        if hooks_of(module):
            raise Refusal(f"`{unparse(lifted)}` has a hook, which would no longer run")  # type: ignore[arg-type]
        self.facts.modules[".".join(path)] = type(module)

    def _inside(self, child: Call, expr: ast.Call, scope: Scope) -> None:
        """Goes through a dropped call's own code."""
        at = view(self.home.provenance, child)
        if at is None or child.is_generator:
            raise Refusal(f"the source of {child.code.co_name} is not known")
        if (switch := grad_switch(at)) is not None:
            raise Refusal(f"@{switch} of {at.where()} would be dropped")
        self._note_dropped(child, expr.func, scope)
        inner = self._bind(at, expr, scope)
        if "/torch/nn/modules/" in child.code.co_filename:
            self._torch_module(at, inner)
        else:
            self._block(at.source.node.body, inner)

    def _note_dropped(self, child: Call, func: ast.expr, scope: Scope) -> None:
        name = name_of(child, func, scope.at)
        digest = digest_of(name) if name is not None else None
        if name is not None and digest is not None:
            self.facts.dropped[name] = digest

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
                plain = value is None or isinstance(value, (int, float))  # without a bias, that it has none
                if plain and lifted is not None and node.attr != "training":
                    self._constant(lifted, value)

    def _block(self, block: Sequence[ast.stmt], scope: Scope) -> bool:
        """Goes through the statements that ran. True when one of them returned."""
        for statement in block:
            if not scope.at.ran(statement) and not _leaves_no_trace(statement):
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
        elif isinstance(statement, ast.Expr) and self._changes_own(statement, scope):
            self._expression(statement.value, scope, set())
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
                if not self._fills_own_dict(target, scope) and not self._changes_own(statement, scope):
                    raise Refusal(f"an assignment to `{ast.unparse(target)}` in {scope.at.where()} would be dropped")
                continue
            for name in names:
                scope.arguments[name] = None
                scope.definitions.pop(name, None)
            if len(names) == 1 and isinstance(target, ast.Name):
                value = self._chosen(statement.value, scope)
                scope.arguments[names[0]] = self._lift(value, scope, but=names[0])
                scope.definitions[names[0]] = statement.value

    def _chosen(self, value: ast.expr, scope: Scope) -> ast.expr:
        """The arm of a conditional expression that was taken; the condition has been noted."""
        while isinstance(value, ast.IfExp):
            value = value.body if scope.at.truth(value.test) else value.orelse
        return value

    def _changes_own(self, statement: ast.stmt, scope: Scope) -> bool:
        """Whether a statement changes in place only what the region itself has made."""
        numbers = scope.at.numbers_in(statement)
        mutated = [n for n in numbers if writes_in_place([n], self.home.provenance) is not None]
        return bool(mutated) and numbers <= self.numbers and writes_in_place(self.numbers, self.home.provenance) is None

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


def _leaves_no_trace(statement: ast.stmt) -> bool:
    """Whether a statement, such as a docstring, is passed without a line event of its own."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.FunctionDef, ast.Pass)) or (
        isinstance(statement, ast.AnnAssign) and statement.value is None
    )


def _kind(node: ast.AST) -> str:
    names = {
        "For": "a loop", "While": "a loop", "With": "a with block", "Try": "a try block",
        "Expr": "a call for its effect", "NamedExpr": "a walrus", "Lambda": "a lambda", "Raise": "a raise",
        "AugAssign": "an augmented assignment", "FunctionDef": "a nested function",
    }  # fmt: skip
    name = type(node).__name__
    return f"{names.get(name, name)} at line {getattr(node, 'lineno', 0)}"


def _is_lookup(expr: ast.expr) -> bool:
    """`registry.get_interface(key, default)`, as transformers chooses an implementation."""
    return (
        isinstance(expr, ast.Call)
        and isinstance(expr.func, ast.Attribute)
        and expr.func.attr == "get_interface"
        and bool(expr.args)
    )


def _arguments(expr: ast.Call) -> list[ast.expr]:
    return [*expr.args, *(keyword.value for keyword in expr.keywords)]


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
