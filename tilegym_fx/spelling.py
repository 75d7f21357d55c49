"""Marks for `patterns/<definition>.py`: which functions are spellings, and which ones guard them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import torch

Guard = Callable[..., "str | None"]
_F = TypeVar("_F", bound=Callable[..., Any])

_SOURCES = "__tilegym_fx_sources__"
_GUARDED = "__tilegym_fx_guarded__"


@dataclass(frozen=True)
class Spelling:
    """Another way in which models write a Definition's mathematics.

    Attributes:
        name: Name of the function in `patterns/<definition>.py`.
        function: Plain PyTorch with the parameters and results of the reference's `run`.
        sources: Permalinks to the code that is written this way.
        guards: The checks that a place must pass before this spelling may match there.
    """

    name: str
    function: Callable[..., Any]
    sources: tuple[str, ...]
    guards: tuple[Guard, ...] = ()


def spelling(*, source: str | tuple[str, ...]) -> Callable[[_F], _F]:
    """Marks a function as a spelling.

    Args:
        source: One permalink with line anchors, or several, to the code that is written this way.
    """

    def mark(function: _F) -> _F:
        setattr(function, _SOURCES, _as_tuple(source))
        return function

    return mark


@overload
def guard(check: _F, /) -> _F: ...
@overload
def guard(*, only: str | tuple[str, ...]) -> Callable[[_F], _F]: ...
def guard(check: _F | None = None, /, *, only: str | tuple[str, ...] = ()) -> _F | Callable[[_F], _F]:
    """Marks a function as a guard: it returns the reason to refuse a place, or None.

    A guard has the parameters of the reference's `run` and is called with meta or fake tensors and literals.

    Args:
        check: The guard, when the decorator is used without arguments.
        only: Names of the spellings it applies to; without it, the reference and every spelling.
    """
    names = _as_tuple(only)

    def mark(function: _F) -> _F:
        setattr(function, _GUARDED, names)
        return function

    return mark if check is None else mark(check)


def spellings_in(module: ModuleType) -> Mapping[str, Spelling]:
    """Returns the spellings of a pattern module by name, in the order of the file, each with its guards."""
    marked = {name: value for name, value in vars(module).items() if hasattr(value, _SOURCES)}
    return {
        name: Spelling(name, function, getattr(function, _SOURCES), guards_in(module, name))
        for name, function in marked.items()
    }


def guards_in(module: ModuleType, name: str = "reference") -> tuple[Guard, ...]:
    """Returns the guards of a pattern module that apply to `name`, a spelling or ``reference``."""
    return tuple(
        value
        for value in vars(module).values()
        if (names := getattr(value, _GUARDED, None)) is not None and (not names or name in names)
    )


def shapes_in(module: ModuleType) -> Mapping[str, tuple[str, ...] | None]:
    """Returns what a pattern module declares instead of its Definition; see `tilegym_fx.axes`."""
    shapes: Mapping[str, tuple[str, ...] | None] = getattr(module, "SHAPES", {})
    return shapes


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def unequal(**tensors: torch.Tensor) -> str | None:
    """For guards: a sentence if the tensors' shapes differ, None if they are the same."""
    (first, one), *others = tensors.items()
    for name, other in others:
        if tuple(other.shape) != tuple(one.shape):
            return f"{first} is {_show(one)} but {name} is {_show(other)}: the kernel does not broadcast"
    return None


def _show(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
