"""Where a Match stands in the exported graph: its nodes, its inputs and its outputs in terms of exported nodes.

A Match speaks of a normalised graph, the record of the export of the exported one. `meta["origins"]` of a normalised
node names the exported nodes with its value. The region is then taken from the exported graph itself: everything
between the outputs and the inputs, whatever normalisation did to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..provenance import NODE_KEY, NodeRef, Provenance
from ..results import Match
from .guards import Refusal

aten = torch.ops.aten
#: Operations that give their first argument's value again.
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default}
_SAME_VALUE = _CASTS | {
    aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.dropout.default,
}  # fmt: skip


class Names:
    """Which exported nodes stand for which node of a Match's graph.

    Args:
        graph: The graph that the Matches are of: normalised, or the exported one itself.
        provenance: The record of the export.
    """

    def __init__(self, graph: fx.Graph, provenance: Provenance) -> None:
        self._provenance = provenance
        self._raw = graph is provenance.graph
        self._canonical: dict[str, fx.Node] = {}
        for node in graph.nodes:
            for name in node.meta.get("origins", (node.name,)):
                self._canonical.setdefault(name, node)

    def canonical(self, node: fx.Node) -> fx.Node | None:
        """The Match graph's node with the value of an exported node."""
        found = self._canonical.get(node.name)
        if (self._raw or found is None) and node.target in _SAME_VALUE and isinstance(node.args[0], fx.Node) and _same_type(node, node.args[0]):
            return self.canonical(node.args[0]) or found
        return found

    def of_value(self, value: Any) -> fx.Node | None:
        """The Match graph's node that a recorded value is."""
        if not isinstance(value, NodeRef):
            return None
        node = self._provenance.resolve(value)
        return self.canonical(node) if node is not None else None

    def same_shape(self, value: NodeRef, node: fx.Node) -> bool:
        """Whether a recorded value has the shape and dtype of a Match graph's node."""
        exported = self._provenance.resolve(value)
        return exported is not None and _same_type(exported, node)

    def origins(self, node: fx.Node) -> list[fx.Node]:
        """The exported nodes of a Match graph's node, in the order in which they ran."""
        names = node.meta.get("origins", (node.name,))
        found = [self._provenance.node(name) for name in names]
        return sorted((n for n in found if n is not None), key=lambda n: n.meta.get(NODE_KEY, -1))


@dataclass(frozen=True)
class Region:
    """A Match in the exported graph.

    Attributes:
        match: The Match.
        numbers: The numbers of the exported nodes between its inputs and its outputs, outputs included.
        inputs: Definition input -> the Match graph's node, for the inputs that are tensors.
        literals: Definition input -> its value, for the others.
        outputs: The Match graph's output nodes, in the Definition's order.
    """

    match: Match
    numbers: frozenset[int]
    inputs: dict[str, fx.Node]
    literals: dict[str, Any]
    outputs: tuple[fx.Node, ...]


def region_of(match: Match, names: Names) -> Region:
    """The region of a Match.

    Raises:
        Refusal: If it reads a value that is none of its inputs.
    """
    inputs = {name: bound for name, bound in match.inputs.items() if isinstance(bound, fx.Node)}
    literals = {name: bound for name, bound in match.inputs.items() if not isinstance(bound, fx.Node)}
    stops = set(inputs.values())
    found: dict[fx.Node, None] = {}
    todo: list[fx.Node] = []
    for output in match.outputs:
        origins = names.origins(output)
        if not origins:
            raise Refusal(f"output {output.name} stands for no exported node")
        todo.append(origins[0])
    ends = set(todo)
    while todo:
        node = todo.pop()
        if node in found or (node not in ends and _stops(node, stops, names)):
            continue
        if node.op == "placeholder" and names.canonical(node) not in stops:
            raise Refusal(f"the region reads {node.name}, which is none of its inputs")
        found[node] = None
        todo.extend(node.all_input_nodes)
    return Region(match, frozenset(n.meta[NODE_KEY] for n in found), inputs, literals, match.outputs)


def _stops(node: fx.Node, stops: set[fx.Node], names: Names) -> bool:
    """Whether the region ends before this node. A cast that does nothing here is part of it: in another dtype it acts."""
    return names.canonical(node) in stops and node.target not in _CASTS or node.op == "get_attr"


def outside_users(numbers: Iterable[int], provenance: Provenance) -> list[fx.Node]:
    """The exported nodes among these that some other node reads."""
    inside = set(numbers)
    found: list[fx.Node] = []
    for number in sorted(inside):
        node = provenance._nodes.get(number)
        if node is not None and any(user.meta.get(NODE_KEY, -1) not in inside for user in node.users):
            found.append(node)
    return found


def writes_in_place(numbers: Iterable[int], provenance: Provenance) -> fx.Node | None:
    """The first exported node among these that changes a tensor in place."""
    for number in sorted(numbers):
        node = provenance._nodes.get(number)
        schema = getattr(getattr(node, "target", None), "_schema", None)
        if node is not None and schema is not None and schema.is_mutable:
            return node
    return None


def _same_type(left: fx.Node, right: fx.Node) -> bool:
    a, b = left.meta.get("val"), right.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype
