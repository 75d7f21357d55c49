"""Which values may share memory with something that the graph writes in place."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

aten = torch.ops.aten

#: Ops that may return their input itself although their schema does not say so in every overload.
MAY_ALIAS = {
    aten.cartesian_prod.default,
    aten.sum_to_size.default,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.reshape.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
    aten.flatten.using_ints,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.einsum.default,
    aten.broadcast_tensors.default,
    aten.meshgrid.default,
    aten.meshgrid.indexing,
    aten.atleast_1d.default,
    aten.atleast_2d.default,
    aten.atleast_3d.default,
}


def _schema(node: Node) -> torch._C.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def written_args(node: Node) -> list[Node]:
    """The arguments that the call writes in place, by schema (never by name).

    A higher-order operator has none: it counts as writing all that it gets.
    """
    schema = _schema(node)
    if node.op == "call_function" and isinstance(node.target, HigherOrderOperator):
        return node.all_input_nodes
    if schema is None or not schema.is_mutable:
        return []
    out = []
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            out += _given(node, i, arg.name)
    return out


def _given(node: Node, place: int, name: str) -> list[Node]:
    """The nodes in one argument of a call."""
    value: Any = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    if isinstance(value, Node):
        return [value]
    return [v for v in value if isinstance(v, Node)] if isinstance(value, list | tuple) else []


def _aliased_args(node: Node) -> list[Node]:
    schema = _schema(node)
    if node.target is getattr:
        return []
    if schema is None:
        # operator.getitem and friends: the result is (part of) the argument
        return node.all_input_nodes if node.op == "call_function" else []
    if node.target is aten.type_as.default:
        return node.all_input_nodes[:1]
    if node.target in MAY_ALIAS and all(r.alias_info is None for r in schema.returns):
        return node.all_input_nodes
    if all(r.alias_info is None for r in schema.returns):
        return []
    shown = (_given(node, i, arg.name) for i, arg in enumerate(schema.arguments) if arg.alias_info is not None)
    return [value for values in shown for value in values]


def aliases(node: Node) -> set[Node]:
    """The node and every value that may be, or be a view of, its memory."""
    found, waiting = {node}, [node]
    while waiting:
        here = waiting.pop()
        new = {user for user in here.users if user not in found and here in _aliased_args(user)}
        found |= new
        waiting += new
    return found


class Writes:
    """In-place writes of a graph, by memory root.

    A *root* is the node that brought a piece of memory into the graph. ``epoch`` numbers the writes to a
    node's roots that come before a position: two reads see the same bytes only if their epochs are equal.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._position: dict[Node, int] = {}
        self._writes: dict[Node, list[int]] = defaultdict(list)
        for position, node in enumerate(graph.nodes if any(map(written_args, graph.nodes)) else ()):
            self._position[node] = position
            for arg in written_args(node):
                for root in self._memory[arg]:
                    self._writes[root].append(position)

    @cached_property
    def _memory(self) -> dict[Node, frozenset[Node]]:
        """The roots of every node. Few who ask for writes ask for these as well."""
        found: dict[Node, frozenset[Node]] = {}
        for node in self._graph.nodes:
            aliased = _aliased_args(node)
            roots = frozenset().union(*(found[a] for a in aliased)) if aliased else frozenset()
            found[node] = roots or frozenset({node})
        return found

    def _returned(self) -> list[Node]:
        """What the caller gets, as the graph is now: since the record was made values may have been replaced."""
        output = next((node for node in reversed(self._graph.nodes) if node.op == "output"), None)
        return output.all_input_nodes if output else []

    def __bool__(self) -> bool:
        return bool(self._writes)

    def touched(self, node: Node) -> bool:
        """Whether memory that the node's value may live in is written anywhere in the graph."""
        return bool(self._writes) and any(root in self._writes for root in self.roots(node))

    def roots(self, node: Node) -> frozenset[Node]:
        """The nodes whose memory the node's value may live in; none for a node newer than this record."""
        return self._memory.get(node, frozenset())

    def may_stand_for(self, source: Node, copy: Node) -> bool:
        """Whether ``source`` may take the place of an equal value in memory of its own.

        Nobody may write either of them, the caller included: of two values that he gets, or gave, neither
        becomes an alias of the other. Where the answer is yes, it is taken for done.
        """
        if self.touched(source) or self.touched(copy):
            return False
        shown = aliases(copy)
        if any(user.op == "output" for node in shown for user in node.users):
            others = frozenset[Node]().union(*(self.roots(n) for n in self._returned() if n not in shown))
            if any(root.op != "call_function" or root in others for root in self.roots(source)):
                return False
        if "_memory" in vars(self):  # what is read off the graph later finds it done
            self._memory.update({node: self.roots(node) | self.roots(source) for node in shown})
        return True

    def epoch(self, value: Node, reader: Node) -> int:
        """How many writes to the value's memory come before the reader."""
        if not self._writes:
            return 0
        position = self._position[reader]
        return sum(p < position for root in self.roots(value) for p in self._writes.get(root, ()))
