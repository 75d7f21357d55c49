"""The functions that classes and modules hold: found behind what is around them or by a name, and known by a digest."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

from .source import function_source

#: The module that a function is reached through, and its name there: `apply_rotary_pos_emb`, `Linear.forward`.
Name = tuple[str, str]
#: Packages whose decorators a function may have in its text.
DECORATORS_FROM = ("torch", "transformers", "functools", "typing")


def plain_function(held: Any, code: Any = None) -> FunctionType | None:
    """The function behind what a class holds, decorators undone; None if it is none or has another code."""
    while True:
        innermost = not hasattr(held, "__wrapped__") if code is None else getattr(held, "__code__", None) is code
        if isinstance(held, FunctionType) and innermost:
            return held
        wrapped: Callable[..., Any] | None = getattr(held, "__wrapped__", None)
        if isinstance(held, (staticmethod, classmethod, property)) or wrapped is None:
            return None
        held = wrapped


def foreign_wrapper(held: Any) -> str | None:
    """What was put around a method once its class was made: decorators that stand above it are read in its text, and
    are of packages that are known."""
    while (inner := getattr(held, "__wrapped__", None)) is not None:
        module = str(getattr(held, "__globals__", {}).get("__name__", type(held).__module__))
        if module.split(".")[0] not in DECORATORS_FROM:
            name = getattr(getattr(held, "__code__", None), "co_name", type(held).__name__)
            return f"{name} of {module}"
        held = inner
    return None


def digest_of(name: Name) -> str | None:
    """The hash of a function's text as it is now, with those of the wrappers around it; None if one has no text."""
    digests = []
    for layer in layers(_held(name)):
        source = function_source(layer.__code__)
        if source is None:
            return None
        digests.append(source.digest)
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if digests else None


def _held(name: Name) -> Any:
    """What a name stands for; None if nothing."""
    try:
        held: Any = import_module(name[0])
    except (ImportError, ValueError):
        return None
    for part in name[1].split("."):
        held = inspect.getattr_static(held, part, None)
    return held


def layers(held: Any) -> Iterator[FunctionType]:
    """A function's wrappers from the outside in, then itself."""
    while held is not None:
        held = getattr(held, "__func__", held)
        if isinstance(held, FunctionType):
            yield held
        held = getattr(held, "__wrapped__", None)


def codes_of(name: Name) -> set[Any]:
    """The code objects of what a name stands for and of its wrappers."""
    return {layer.__code__ for layer in layers(_held(name))}
