"""Small sizes for a Definition's axes that satisfy its constraints."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tilegym_fx.schema import AxisConst, Definition, TensorSpec

#: Odd sizes first, then twice an odd number: code that only works on round sizes is the common mistake.
_SIZES = (3, 5, 7, 9, 11, 13, 15, 6, 10, 14, 2, 4, 8, 12, 16)
_ARITHMETIC = (
    ast.Expression,
    ast.Compare,
    ast.BinOp,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Name,
    ast.Constant,
    ast.IfExp,
    ast.operator,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
    ast.expr_context,
)


class CannotTryError(Exception):
    """Inputs for this Definition cannot be made up; the message says why. Never leaves ``check``."""


def sizes_of(definition: Definition, *, equal: bool = False) -> dict[str, int]:
    """A size for every axis and a value for every int scalar, such that every constraint holds.

    Args:
        definition: Whose axes.
        equal: Make sizes equal where the constraints allow it, else different; of ``A == B * C``, A and C.

    Raises:
        CannotTryError: A constraint reads tensor values, or no small sizes satisfy them all.
    """
    fixed = {name: axis.value for name, axis in definition.axes.items() if isinstance(axis, AxisConst)}
    scalars = [name for name, spec in definition.inputs.items() if is_int_scalar(spec)]
    free = [name for name in (*definition.axes, *scalars) if name not in fixed]
    conditions = [_Condition(text) for text in definition.constraints]
    others = {
        name: scalar_value(spec) for name, spec in definition.inputs.items() if spec.is_scalar and name not in free
    }
    for condition in conditions:
        if not condition.names <= {*fixed, *free, *others}:
            raise CannotTryError(f"the constraint `{condition.text}` reads tensor values")
    free.sort(key=lambda name: any(condition.defines == name for condition in conditions))
    if equal:
        fixed |= {c.factor: 1 for c in conditions if c.factor in free}
        free = [name for name in free if name not in fixed]
    for prefer in (_same, _none) if equal else (_different, _none):
        found = next(_assign(free, {**others, **fixed}, conditions, prefer), None)
        if found is not None:
            return {name: found[name] for name in (*fixed, *free)}
    raise CannotTryError("no sizes up to 16 satisfy its constraints")


class _Condition:
    """A constraint that is plain arithmetic over named numbers."""

    def __init__(self, text: str) -> None:
        self.text = text
        tree = ast.parse(text.strip(), mode="eval")
        if any(isinstance(node, ast.Pow) or not isinstance(node, _ARITHMETIC) for node in ast.walk(tree)):
            raise CannotTryError(f"the constraint `{text}` reads tensor values")
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.defines, self._definition = self._defined(tree.body)
        self.factor = self._factor(tree.body)
        self._code = compile(tree, "<constraint>", "eval")

    @staticmethod
    def _factor(body: ast.expr) -> str | None:
        """The first factor of ``name == name * name``: if it is 1, the other two are equal."""
        match body:
            case ast.Compare(
                left=ast.Name(),
                ops=[ast.Eq()],
                comparators=[ast.BinOp(left=ast.Name(id=factor), op=ast.Mult(), right=ast.Name())],
            ):
                return factor
        return None

    @staticmethod
    def _defined(body: ast.expr) -> tuple[str | None, Any]:
        """For ``name == expression``: the name, and the expression's code."""
        match body:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[expression]):
                return name, compile(ast.Expression(expression), "<constraint>", "eval")
        return None, None

    def holds(self, values: Mapping[str, Any]) -> bool:
        return not self.names <= values.keys() or bool(_evaluate(self._code, values))

    def value(self, name: str, values: Mapping[str, Any]) -> int | None:
        if self.defines != name or not self.names - {name} <= values.keys():
            return None
        result = _evaluate(self._definition, values)
        return result if isinstance(result, int) and result > 0 else None


def _evaluate(code: Any, values: Mapping[str, Any]) -> Any:
    try:
        return eval(code, {"__builtins__": {}}, dict(values))
    except (ArithmeticError, TypeError, ValueError):
        return None


def _different(used: Collection[int]) -> list[int]:
    return [size for size in _SIZES if size not in used]


def _same(used: Collection[int]) -> list[int]:
    return sorted(_SIZES, key=lambda size: size not in used)


def _none(_: Collection[int]) -> list[int]:
    return [*_SIZES, 1]


def _assign(
    names: Sequence[str],
    values: dict[str, Any],
    conditions: Sequence[_Condition],
    prefer: Callable[[Collection[int]], list[int]],
) -> Iterator[dict[str, Any]]:
    """Every assignment that satisfies the conditions, by backtracking."""
    if not all(condition.holds(values) for condition in conditions):
        return
    if not names:
        yield values
        return
    name, *rest = names
    given = [value for condition in conditions if (value := condition.value(name, values)) is not None]
    for size in given or prefer(values.values()):
        yield from _assign(rest, {**values, name: size}, conditions, prefer)


def scalar_value(spec: TensorSpec) -> float | bool:
    """Exact in every dtype, and no power of two: in the normal form a division by one of these is a product."""
    return True if spec.dtype == "bool" else 0.375


def is_int_scalar(spec: TensorSpec) -> bool:
    return spec.is_scalar and "int" in spec.dtype
