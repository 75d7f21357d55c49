"""The guard that every Definition has: a place's inputs have the declared shapes.

A reference broadcasts, and so its trace proves nothing about sizes; a kernel takes what is declared. The same
axis has the same size wherever it stands, a constant one its value, and the constraints hold. ``N`` in front
stands for any leading dimensions, alike in all inputs.

A kernel may take more than is declared. `SHAPES` in `patterns/<definition>.py` says so for single inputs::

    SHAPES = {"mask": ("1 or B", "One", "S", "T"), "x": ("...", "H"), "table": None}

In place of an axis there may be ``...`` in front, which is what ``N`` is, and alternatives in order, each an
expression of axes; the same alternatives are the same size wherever they stand. None leaves an input to guards.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from types import CodeType
from typing import Any

from .schema import Definition

Shape = tuple[str, ...]
#: What stands for any number of dimensions in front.
_LEADING = ("N", "...")
_OR = " or "


def declared(definition: Definition, other: Mapping[str, Shape | None]) -> Callable[..., str | None]:
    """A guard that returns the first reason why inputs are not of the declared shapes, or None.

    Args:
        definition: That declares them.
        other: Shapes that take the place of declared ones; None for an input that is not looked at.
    """
    constants = {name: axis.value for name, axis in definition.axes.items() if axis.type == "const"}
    given = {name: other.get(name, spec.shape) for name, spec in definition.inputs.items() if spec.shape is not None}
    shapes = {name: shape for name, shape in given.items() if shape is not None}
    numbers = [name for name, spec in definition.inputs.items() if spec.shape is None]

    def shapes_are_declared(**inputs: Any) -> str | None:
        sizes: dict[str, Any] = dict(constants)
        actual = {name: tuple(inputs[name].shape) for name in shapes}
        for name, shape in shapes.items():
            if not _has_rank(shape, actual[name]):
                return f"{name} has {len(actual[name])} dimensions, not {len(shape)}"
        for of_axes in (True, False):  # alternatives are of axes that all inputs together tell
            for name, shape in shapes.items():
                for axis, size in _places(shape, actual[name]):
                    if _is_axis(axis) == of_axes and not _fits(axis, size, sizes):
                        return _misfit(name, actual[name], shape, sizes)
        return _broken(definition.constraints, {**{n: inputs[n] for n in numbers}, **sizes})

    return shapes_are_declared


def _has_rank(shape: Shape, actual: Sequence[Any]) -> bool:
    return len(actual) >= len(shape) - 1 if _leads(shape) else len(actual) == len(shape)


def _leads(shape: Shape) -> bool:
    return bool(shape) and shape[0] in _LEADING


def _places(shape: Shape, actual: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """What is declared, with the size that is there; leading dimensions are one tuple."""
    cut = len(actual) - len(shape) + 1 if _leads(shape) else 0
    return zip(shape, (actual[:cut], *actual[cut:]) if _leads(shape) else actual, strict=True)


def _fits(axis: str, size: Any, sizes: dict[str, Any]) -> bool:
    """Whether an axis, or alternatives, may have a size; it has it from then on."""
    alternatives = () if _is_axis(axis) or axis in sizes else axis.split(_OR)
    if alternatives and not any(size == _value(one, sizes) for one in alternatives):
        return False
    return bool(sizes.setdefault(axis, size) == size)


def _is_axis(text: str) -> bool:
    return text.isidentifier() or text in _LEADING


def _misfit(name: str, actual: Sequence[Any], shape: Shape, sizes: Mapping[str, Any]) -> str:
    names = dict.fromkeys(known for axis in shape for known in _names(axis) if known in sizes)
    known = f" with {_told(names, sizes)}" if names else ""
    return f"{name} is {_listed(actual)}, not {_listed(shape)}{known}: the kernel does not broadcast"


def _broken(constraints: Sequence[str], sizes: Mapping[str, Any]) -> str | None:
    """The first constraint that does not hold, of those whose names all have a size."""
    for constraint in constraints:
        if _names(constraint) <= sizes.keys() and not _value(constraint, sizes):
            return f"{constraint} does not hold for {_told(sorted(_names(constraint)), sizes)}"
    return None


def _value(expression: str, sizes: Mapping[str, Any]) -> Any:
    """What an expression comes to; None where it divides by zero or names what no input has."""
    flat = {name: prod(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
    try:
        return eval(_compiled(expression), {"__builtins__": {}}, flat)
    except (ZeroDivisionError, NameError):
        return None


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression.strip(), "<axes>", "eval")


@cache
def _names(expression: str) -> frozenset[str]:
    if expression in _LEADING:
        return frozenset([expression])
    return frozenset(node.id for node in ast.walk(ast.parse(expression.strip())) if isinstance(node, ast.Name))


def _told(names: Sequence[str] | Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} = {_listed(s) if isinstance(s := sizes[n], tuple) else s}" for n in names)


def _listed(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"


__all__ = ["Shape", "declared"]
