"""Functions whose code is gone from an emitted file: the name under which each is found again, and its text's hash."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType

from ..authored.functions import Name, codes_of
from ..provenance import Call
from .values import View


def name_of(call: Call, func: ast.expr, at: View) -> Name | None:
    """The name of a function that was called; None for one that has none, such as one made by another function.

    Args:
        call: The run of the function.
        func: The expression that it was called by.
        at: The call that this expression stands in.
    """
    return next((name for name in _candidates(call, func, at) if call.code in codes_of(name)), None)


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
