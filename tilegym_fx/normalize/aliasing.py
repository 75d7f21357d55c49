"""Which values may share memory with something that the graph writes in place."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

#: Ops that may return their input itself although their schema does not say so in every overload.
MAY_ALIAS = {
    aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout,
    aten.to.other, aten.type_as.default, aten.flatten.using_ints, aten.dropout.default,
}  # fmt: skip


def _schema(node: Node) -> torch._C.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def written_args(node: Node) -> list[Node]:
    """The arguments that the call writes in place, by schema (never by name)."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return []
    out = []
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
            out += [value] if isinstance(value, Node) else [v for v in value or () if isinstance(v, Node)]
    return out


def _aliased_args(node: Node) -> list[Node]:
    schema = _schema(node)
    if node.target is getattr:
        return []
    if schema is None:
        # operator.getitem and friends: the result is (part of) the argument
        return [a for a in node.args if isinstance(a, Node)] if node.op == "call_function" else []
    if node.target in MAY_ALIAS or any(r.alias_info is not None for r in schema.returns):
        return node.all_input_nodes
    return []


class Writes:
    """In-place writes of a graph, by memory root.

    A *root* is the node that brought a piece of memory into the graph. ``epoch`` numbers the writes to a node's
    roots that come before a position: two reads see the same bytes only if their epochs are equal.
    """

    def __init__(self, graph: Graph):
        self._roots: dict[Node, frozenset[Node]] = {}
        self._position: dict[Node, int] = {}
        self._writes: dict[Node, list[int]] = defaultdict(list)
        for position, node in enumerate(graph.nodes):
            self._position[node] = position
            aliased = _aliased_args(node)
            roots = frozenset().union(*(self._roots[a] for a in aliased)) if aliased else frozenset()
            self._roots[node] = roots or frozenset({node})
            for arg in written_args(node):
                for root in self._roots[arg]:
                    self._writes[root].append(position)

    def __bool__(self) -> bool:
        return bool(self._writes)

    def touched(self, node: Node) -> bool:
        """Whether memory that the node's value may live in is written anywhere in the graph."""
        return bool(self._writes) and any(root in self._writes for root in self._roots.get(node, ()))

    def epoch(self, value: Node, reader: Node) -> int:
        """How many writes to the value's memory come before the reader."""
        if not self._writes:
            return 0
        position = self._position[reader]
        return sum(p < position for root in self._roots.get(value, ()) for p in self._writes.get(root, ()))
