"""What the matcher compares of a node: its operation, its operands and its literals, in one canonical shape.

The members of the view family count as one operation whose literal is the shape they give, so that neither
the author's choice of call nor the arguments from which a size was computed matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .normalize.casts import CAST
from .normalize.cleanup import is_pure
from .normalize.edit import args_of, aten, shape_key
from .normalize.views import RESHAPES, view_nodes

#: Operations whose two tensor operands may be exchanged.
COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
#: Arguments that choose an implementation, not a value.
_IRRELEVANT = {"cudnn_enable", "cudnn_enabled", "pin_memory"}
_CONSTANTS = {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
#: Operations that write into their first operand -> what they are but for that.
IN_PLACE: dict[Any, Any] = {
    aten.index_copy_.default: aten.index_copy.default,
    aten.copy_.default: aten.copy.default,
}
#: Operations whose results others may read too: beside a kernel they cost little or nothing.
SHAREABLE = frozenset({*view_nodes(), CAST, *_CONSTANTS})
_BY_SHAPE: dict[Any, str] = {**dict.fromkeys(RESHAPES, "reshape"), aten.expand.default: "expand"}


@dataclass(frozen=True)
class Symbol:
    """A number that is known only when the graph runs; equal to another of the same symbolic expression."""

    expression: str
    node: Node = field(compare=False)


@dataclass(frozen=True)
class Facts:
    """One node as the matcher sees it.

    Attributes:
        operation: The op, or a name that stands for a family of ops.
        operands: The tensors it reads, in order; lists of tensors are flattened.
        literals: ``(place, value)`` of every other argument; sizes appear by value or symbol.
        commutes: Whether the two operands may be exchanged.
    """

    operation: Any
    operands: tuple[Node, ...]
    literals: tuple[tuple[str, Any], ...]
    commutes: bool


def facts_of(node: Node) -> Facts:
    """The facts of a call_function node of a normalised graph."""
    family = _BY_SHAPE.get(node.target)
    if family is not None:
        shape = tuple(enumerate(shape_key(node.meta["val"].shape)))
        return Facts(family, args_of(node)[:1], tuple((f"shape[{i}]", s) for i, s in shape), False)
    operands: list[Node] = []
    literals: list[tuple[str, Any]] = []
    for place, value in _arguments(node):
        _collect(place, value, operands, literals)
    commutes = node.target in COMMUTATIVE and len(operands) == 2 and all(v == 1 for _, v in literals)
    return Facts(IN_PLACE.get(node.target, node.target), tuple(operands), tuple(literals), commutes)


def _arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Every argument by its schema name, defaults included; by position where there is no schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from ((str(i), value) for i, value in enumerate(node.args))
        yield from sorted(node.kwargs.items())
        return
    for i, argument in enumerate(schema.arguments):
        if argument.name in _IRRELEVANT:
            continue
        if i < len(node.args) and not argument.kwarg_only:
            yield argument.name, node.args[i]
        else:
            yield argument.name, node.kwargs.get(argument.name, argument.default_value)


def _collect(place: str, value: Any, operands: list[Node], literals: list[tuple[str, Any]]) -> None:
    if isinstance(value, Node):
        fake = value.meta.get("val")
        if isinstance(fake, torch.SymInt | torch.SymFloat):
            literals.append((place, Symbol(str(fake.node.expr), value)))
        elif isinstance(fake, int | float):
            literals.append((place, fake))
        else:
            operands.append(value)
    elif isinstance(value, list | tuple):
        literals.append((f"{place}.length", len(value)))
        for i, item in enumerate(value):
            _collect(f"{place}[{i}]", item, operands, literals)
    else:
        literals.append((place, value))


def operations_of(graph: Graph) -> frozenset[Any]:
    """The operations of a normalised graph that views and casts are not: what a kernel could be for."""
    calls = (IN_PLACE.get(node.target, node.target) for node in graph.nodes if node.op == "call_function")
    return frozenset(target for target in calls if target not in SHAREABLE)


def graph_facts(graph: Graph) -> dict[Node, Facts]:
    """The facts of every call in the graph."""
    return {node: facts_of(node) for node in graph.nodes if node.op == "call_function"}


def constants_of(graph: Graph) -> frozenset[Node]:
    """The calls that hang on no input, such as a triangle of ones: equal ones of several layers are one node."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes) and is_pure(node):
            found.add(node)
    return frozenset(found)
