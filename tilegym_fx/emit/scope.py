"""Names of a called function in terms of the function that is rewritten.

A called function sees its own parameters and locals. What it was given, the rewritten function can say
too: that expression is the name "lifted".
"""

from __future__ import annotations

import ast
import copy

from torch import nn

from ..authored.source import children
from .flow import reads, target_names
from .outcome import Refusal
from .values import View

#: Methods of a tensor that give sizes.
SHAPE_METHODS = {"size", "dim", "numel", "ndimension"}


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
        rest = at.source.node.args.vararg
        self.rest_name = rest.arg if rest is not None else None
        self.rest: list[ast.expr | None] = []
        self.definitions: dict[str, ast.expr] = {}


class Lifter:
    """Lifts expressions of dropped code into the rewritten function.

    Args:
        home: The rewritten function.
        written: Names that the dropped statements of the rewritten function bind.

    Attributes:
        follows_objects: Whether methods of objects that are no modules are gone through.
    """

    follows_objects = False

    def __init__(self, home: View, written: set[str]) -> None:
        self.home = home
        self.written = written
        self._root = home.call.code.co_varnames[0] if home.call.code.co_argcount else ""

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
        """`kwargs.get("x", d)` of a `**kwargs` parameter, by what the rewritten function passes on."""
        if scope.at is self.home or scope.extra_name is None or not isinstance(expr, ast.Call):
            return None
        func = expr.func
        if not (isinstance(func, ast.Attribute) and func.attr == "get" and isinstance(func.value, ast.Name)):
            return None
        if func.value.id != scope.extra_name or not isinstance(expr.args[0], ast.Constant):
            return None
        key = f"**{expr.args[0].value!s}"
        if key in scope.arguments:
            return scope.arguments[key]
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
        elif isinstance(expr.func, ast.Attribute) and self._is_method(expr.func.value, at, scope):
            positional.append(self._lift(expr.func.value, scope))
        extra: ast.expr | None = None
        for argument in expr.args:
            positional += self._starred(argument, scope)
        arguments: dict[str, ast.expr | None] = dict(zip(names, positional, strict=False))
        known = {*names, *(a.arg for a in spec.kwonlyargs)}
        for keyword in expr.keywords:
            if keyword.arg is None and self._is_own_extra(keyword.value, scope):
                extra = scope.extra
                for name, passed in scope.arguments.items():
                    if name.startswith("**"):
                        arguments[name[2:] if name[2:] in known else name] = passed
                continue
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
        inner.rest = positional[len(names) :]
        self._check_binding(inner)
        return inner

    def _starred(self, argument: ast.expr, scope: Scope) -> list[ast.expr | None]:
        """One positional argument, or those that a `*args` parameter handed on stands for."""
        if not isinstance(argument, ast.Starred):
            return [self._lift(argument, scope)]
        if isinstance(argument.value, ast.Name) and argument.value.id == scope.rest_name and scope.at is not self.home:
            return list(scope.rest)
        raise Refusal(f"`*{ast.unparse(argument.value)}` in {scope.at.where()} cannot be followed")

    def _is_own_extra(self, value: ast.expr, scope: Scope) -> bool:
        """Whether `**value` hands on a `**kwargs` parameter of dropped code."""
        return scope.at is not self.home and isinstance(value, ast.Name) and value.id == scope.extra_name

    def _is_method(self, base: ast.expr, at: View, scope: Scope) -> bool:
        if self.follows_objects and at.call.receiver is not None:
            return True
        return at.call.module is not None and scope.at.value(base) is at.call.module

    def _check_binding(self, scope: Scope) -> None:
        """A wrapper between the call and the function may have changed the arguments."""
        variadic = {a.arg for a in (scope.at.source.node.args.vararg, scope.at.source.node.args.kwarg) if a}
        variadic |= set(scope.at.call.code.co_freevars)
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
                parts.append(f"{lifted.slice.value!s}")
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
        return all(self._is_constant(part) for part in children(lifted) if isinstance(part, ast.expr))

    def _is_local(self, name: str, scope: Scope) -> bool:
        code = scope.at.source.code
        return name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars

    def _is_size(self, expr: ast.expr, scope: Scope) -> bool:
        """Whether a number comes from the shape of a tensor: the axes of a Definition take care of those."""
        seen: set[str] = set()
        todo: list[ast.AST] = [expr]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim"):
                return True
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SHAPE_METHODS:
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                todo.extend(_definitions(node.id, scope.at))
            todo.extend(children(node))
        return False


def _has_walrus(expr: ast.expr) -> bool:
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(expr))


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
    arguments: list[ast.expr] = [ast.Constant(name)]
    if not isinstance(default, ast.Constant) or default.value is not None:
        arguments.append(default)
    call = ast.Call(ast.Attribute(extra, "get", ast.Load()), arguments, [])
    return ast.fix_missing_locations(call)


def _definitions(name: str, at: View) -> list[ast.expr]:
    """The right-hand sides from which a local was set."""
    return [
        node.value
        for node in ast.walk(at.source.node)
        if isinstance(node, ast.Assign) and any(name in (target_names(t) or ()) for t in node.targets)
    ]
