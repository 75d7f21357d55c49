"""Functions whose code is gone from an emitted file: the name under which each is found again, and its text's hash."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

from ..provenance import Call
from .source import function_source
from .values import View

#: The module that a function is reached through, and its name there: `apply_rotary_pos_emb`, `Linear.forward`.
Name = tuple[str, str]


def name_of(call: Call, func: ast.expr, at: View) -> Name | None:
    """The name of a function that was called; None for one that has none, such as one made by another function.

    Args:
        call: The run of the function.
        func: The expression that it was called by.
        at: The call that this expression stands in.
    """
    return next((name for name in _candidates(call, func, at) if call.code in _codes(name)), None)


def digest_of(name: Name) -> str | None:
    """The hash of a function's text as it is now, with those of the wrappers around it; None if one has no text."""
    digests = []
    for layer in _layers(_held(name)):
        source = function_source(layer.__code__)
        if source is None:
            return None
        digests.append(source.digest)
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if digests else None


def _candidates(call: Call, func: ast.expr, at: View) -> Iterator[Name]:
    for base in type(call.module).__mro__ if call.module is not None else ():
        yield base.__module__, f"{base.__qualname__}.{call.code.co_name}"
        yield base.__module__, f"{base.__qualname__}.forward"
    for base in call.receiver.__mro__ if call.receiver is not None else ():
        yield base.__module__, f"{base.__qualname__}.{call.code.co_name}"
    yield str(at.call.globals.get("__name__")), ast.unparse(func)
    target = at.value(func)
    if isinstance(target, FunctionType):
        yield target.__module__, target.__qualname__


def _held(name: Name) -> Any:
    """What a name stands for; None if nothing."""
    try:
        held: Any = import_module(name[0])
    except (ImportError, ValueError):
        return None
    for part in name[1].split("."):
        held = inspect.getattr_static(held, part, None)
    return held


def _layers(held: Any) -> Iterator[FunctionType]:
    """A function's wrappers from the outside in, then itself."""
    while held is not None:
        held = getattr(held, "__func__", held)
        if isinstance(held, FunctionType):
            yield held
        held = getattr(held, "__wrapped__", None)


def _codes(name: Name) -> set[Any]:
    return {layer.__code__ for layer in _layers(_held(name))}
