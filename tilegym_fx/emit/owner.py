"""Which functions may be rewritten: methods of the model's own modules, found by the class, with plain
sources."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..authored.functions import DECORATORS_FROM, foreign_wrapper, plain_function
from .flow import sees_all_locals
from .outcome import Refusal
from .values import View

#: Packages whose modules wrap a model's own; their code is not the model's.
WRAPPERS = ("torch", "peft", "accelerate", "bitsandbytes", "torchao", "deepspeed", "kernels")
_GRAD_SWITCHES = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)


@dataclass(frozen=True)
class Owner:
    """A method that may be rewritten.

    Attributes:
        module: The module whose method it is.
        cls: The module's class.
        definer: The class that the method is written in; `cls` itself or one of its bases.
        name: The method's name.
    """

    module: nn.Module
    cls: type
    definer: type
    name: str


def owner_of(view: View) -> Owner:
    """The method that a recorded call ran.

    Raises:
        Refusal: If it cannot be rewritten, with the reason.
    """
    call, where = view.call, view.where()
    module, name = call.module, call.code.co_name
    if module is None:
        raise Refusal(f"{where} is no method of a module")
    cls = type(module)
    package = str(call.globals.get("__name__", "")).split(".")[0]
    if package in WRAPPERS:
        raise Refusal(f"{where} belongs to {package}")
    name, definer = _find(cls, name, view)
    if name in vars(module):
        raise Refusal(f"{cls.__name__} has a {name} of its own, put there by another library")
    if (wrapper := foreign_wrapper(vars(definer)[name])) is not None:
        raise Refusal(f"{definer.__name__}.{name} is wrapped by {wrapper}, which a new function would not be")
    _check_text(view)
    _check_defaults(view, plain_function(vars(definer)[name], view.call.code))
    if "<locals>" in definer.__qualname__:
        raise Refusal(f"class {definer.__name__} is local to a function, so an emitted file cannot import it")
    return Owner(module, cls, definer, name)


def _find(cls: type, name: str, view: View) -> tuple[str, type]:
    """The name under which a class holds a function, and the class in which it does."""
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is not None and plain_function(vars(definer)[name], view.call.code) is not None:
        return name, definer
    for base in cls.__mro__:
        for attribute, held in vars(base).items():
            if plain_function(held, view.call.code) is None:
                continue
            if next(b for b in cls.__mro__ if attribute in vars(b)) is base:
                return attribute, base
            raise Refusal(f"{view.where()} is reached through super()")
    raise Refusal(f"{view.where()} is a property, or is not found in {cls.__name__}")


def _check_defaults(view: View, function: FunctionType | None) -> None:
    """The defaults of arguments are made anew with a new function; they must come out the same."""
    spec = view.source.node.args
    made = [*spec.defaults, *(default for default in spec.kw_defaults if default is not None)]
    held = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).values(),
    ]
    for expr, value in zip(made, held, strict=True):
        if not _gives_again(expr, value, view.call.globals):
            raise Refusal(f"{view.where()} has the default `{ast.unparse(expr)}`, which a new function would not share")


def _gives_again(expr: ast.expr, value: Any, names: Mapping[str, Any]) -> bool:
    """Whether an expression of constants and names is the value that it once gave."""
    if isinstance(expr, ast.Name):
        return names.get(expr.id, getattr(builtins, expr.id, _MISSING)) is value
    if isinstance(expr, ast.Attribute):
        path = ast.unparse(expr).split(".")
        held = names.get(path[0], _MISSING)
        for part in path[1:]:
            held = getattr(held, part, _MISSING)
        return held is value
    try:
        hash(value)
        made = ast.literal_eval(expr)
    except (ValueError, TypeError):
        return False
    return type(made) is type(value) and made == value


_MISSING = object()


def _check_text(view: View) -> None:
    """Raises what the function's text rules out; the same for every call of it."""
    if view.source.checked is None:
        try:
            _read_text(view)
            view.source.checked = ""
        except Refusal as refusal:
            view.source.checked = str(refusal)
    if view.source.checked:
        raise Refusal(view.source.checked)


def _read_text(view: View) -> None:
    node, code, where = view.source.node, view.call.code, view.where()
    if view.call.is_generator or isinstance(node, ast.AsyncFunctionDef):
        raise Refusal(f"{where} is a generator")
    if "__class__" in code.co_freevars:
        raise Refusal(f"{where} uses super()")
    if code.co_freevars:
        raise Refusal(f"{where} reads {', '.join(code.co_freevars)} from an enclosing function")
    if sees_all_locals(node):
        raise Refusal(f"{where} looks at all its locals")
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name.startswith("__") and not name.endswith("__"):
            raise Refusal(f"{where} uses the private name {name}")
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and _is_grad_switch(part.value, view):
            raise Refusal(f"{where} turns gradients on or off by a statement")
        if isinstance(part, ast.Name) and part.id == "tilegym_fx" and not isinstance(part.ctx, ast.Load):
            raise Refusal(f"{where} has a local named tilegym_fx")
    for decorator in node.decorator_list:
        _check_decorator(decorator, view)


def grad_switch(view: View) -> str | None:
    """The decorator of a function that turns gradients on or off for it, as text."""
    for decorator in view.source.node.decorator_list:
        if _is_grad_switch(decorator, view):
            return ast.unparse(decorator)
    return None


def _is_grad_switch(expr: ast.expr, view: View) -> bool:
    named = expr.func if isinstance(expr, ast.Call) else expr
    if not all(isinstance(part, (ast.Name, ast.Attribute, ast.Load)) for part in ast.walk(named)):
        return False  # to ask what it is would call something
    held = _held(expr, view)
    return (held if isinstance(held, type) else type(held)) in _GRAD_SWITCHES


def _held(decorator: ast.expr, view: View) -> Any:
    """What a decorator or a called name is; None where it says nothing outside of the function."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    try:
        return eval(compile(ast.Expression(target), "<decorator>", "eval"), dict(view.call.globals))
    except (NameError, AttributeError):
        return None


def _check_decorator(decorator: ast.expr, view: View) -> None:
    held = _held(decorator, view)
    package = (inspect.getmodule(held) or type(held)).__name__.split(".")[0] if held is not None else ""
    if package not in DECORATORS_FROM:
        raise Refusal(f"decorator @{ast.unparse(decorator)} of {view.where()} is not known")
