"""Where a Match stands in the exported graph: its nodes, its inputs and its outputs in exported nodes.

A Match speaks of a normalised graph, the record of the export of the exported one. `meta["origins"]` of a
normalised node names the exported nodes with its value. The region is then taken from the exported graph
itself: everything between the outputs and the inputs, whatever normalisation did to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..provenance import NODE_KEY, NodeRef, Provenance
from ..results import Match
from .outcome import Refusal

aten = torch.ops.aten
#: Operations that give their first argument's value again.
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default}
_SAME_VALUE = _CASTS | {
    aten.alias.default, aten.contiguous.default, aten.clone.default,
    aten.dropout.default,
}  # fmt: skip

#: Operations that may give their argument itself although their schema does not say so.
_MAY_ALIAS = {aten.dropout.default, aten.type_as.default}


class Names:
    """Which exported nodes stand for which node of a Match's graph.

    Args:
        graph: The graph that the Matches are of: normalised, or the exported one itself.
        provenance: The record of the export.
    """

    def __init__(self, graph: fx.Graph, provenance: Provenance) -> None:
        self.provenance = provenance
        self._raw = graph is provenance.graph
        self._canonical: dict[str, fx.Node] = {}
        for node in graph.nodes:
            for name in node.meta.get("origins", (node.name,)):
                self._canonical.setdefault(name, node)

    def canonical(self, node: fx.Node) -> fx.Node | None:
        """The Match graph's node with the value of an exported node."""
        found = self._canonical.get(node.name)
        if (
            (self._raw or found is None)
            and node.target in _SAME_VALUE
            and isinstance(node.args[0], fx.Node)
            and _same_type(node, node.args[0])
        ):
            return self.canonical(node.args[0]) or found
        return found

    def of_value(self, value: Any) -> fx.Node | None:
        """The Match graph's node that a recorded value is."""
        if not isinstance(value, NodeRef):
            return None
        node = self.provenance.resolve(value)
        return self.canonical(node) if node is not None else None

    def same_shape(self, value: NodeRef, node: fx.Node) -> bool:
        """Whether a recorded value has the shape and dtype of a Match graph's node."""
        exported = self.provenance.resolve(value)
        return exported is not None and _same_type(exported, node)

    def origins(self, node: fx.Node) -> list[fx.Node]:
        """The exported nodes of a Match graph's node, in the order in which they ran."""
        names = node.meta.get("origins", (node.name,))
        found = [self.provenance.node(name) for name in names]
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
        turned: Definition input -> text after the input's own expression, where normalisation transposed it.
        suffix: Text after the call, where a transposition that the Match ends in is left to its author.
    """

    match: Match
    numbers: frozenset[int]
    inputs: dict[str, fx.Node]
    literals: dict[str, Any]
    outputs: tuple[fx.Node, ...]
    turned: dict[str, str]
    suffix: str = ""


def without_last_turn(match: Match) -> tuple[fx.Node, str] | None:
    """What a Match computes before the transposition that it ends in, and the text that undoes that one."""
    last = match.outputs[0]
    if len(match.outputs) != 1 or not last.args or not isinstance(last.args[0], fx.Node):
        return None
    if last.args[0] not in match.nodes:
        return None
    if last.target is aten.transpose.int:
        return last.args[0], f".transpose({last.args[1]}, {last.args[2]})"
    if last.target is aten.permute.default and isinstance(last.args[1], (list, tuple)):
        rank = len(last.args[1])
        back = sorted(range(rank), key=lambda i: last.args[1][i] % rank)  # type: ignore[index,operator]
        return last.args[0], f".permute({', '.join(map(str, back))})"
    return None


def region_of(match: Match, names: Names, output: fx.Node | None = None, suffix: str = "") -> Region:
    """The region of a Match.

    Args:
        match: The Match.
        names: Which exported nodes its nodes are.
        output: A node that stands for its only output, and the text that makes it of the kernel's.
        suffix: That text.

    Raises:
        Refusal: If it reads a value that is none of its inputs.
    """
    inputs = {name: bound for name, bound in match.inputs.items() if isinstance(bound, fx.Node)}
    literals = {name: bound for name, bound in match.inputs.items() if not isinstance(bound, fx.Node)}
    turned: dict[str, str] = {}
    for name, node in inputs.items():
        if not names.origins(node) and node.target is aten.transpose.int and isinstance(node.args[0], fx.Node):
            inputs[name], turned[name] = node.args[0], f".transpose({node.args[1]}, {node.args[2]})"
    stops = set(inputs.values())
    found: dict[fx.Node, None] = {}
    todo: list[fx.Node] = []
    edges: list[fx.Node] = []
    outputs = match.outputs if output is None else (output,)
    for made in outputs:
        origins = names.origins(made)
        if not origins:
            raise Refusal(f"output {made.name} stands for no exported node")
        todo.append(origins[0])
    ends = set(todo)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        if node not in ends and names.canonical(node) in stops:
            edges.append(node)
            continue
        if node.op == "placeholder" and names.canonical(node) not in stops:
            raise Refusal(f"the region reads {node.name}, which is none of its inputs")
        found[node] = None
        todo.extend(node.all_input_nodes)
    found |= dict.fromkeys(_idle_casts(edges, list(found), names.provenance))
    numbers = frozenset(n.meta[NODE_KEY] for n in found)
    return Region(match, numbers, inputs, literals, outputs, turned, suffix)


def _idle_casts(edges: Iterable[fx.Node], found: Iterable[fx.Node], provenance: Provenance) -> Iterator[fx.Node]:
    """Casts of an input that do nothing here and stand in the region's own code: in another dtype they
    act."""
    calls = {origin.call.index for node in found if (origin := provenance.origin(node)) is not None}
    for node in edges:
        while node.target in _CASTS and (origin := provenance.origin(node)) is not None:
            if origin.call.index not in calls:
                break
            yield node
            node = node.all_input_nodes[0]


def outside_users(numbers: Iterable[int], provenance: Provenance, but: Iterable[int] = ()) -> list[fx.Node]:
    """The exported nodes among these that some other node, none of `but`, reads."""
    nodes = [provenance.resolve(NodeRef(number)) for number in sorted(numbers)]
    inside = {*numbers, *but}
    return [node for node in nodes if node is not None and any(_is_outside(user, inside) for user in node.users)]


def _is_outside(user: fx.Node, inside: set[int]) -> bool:
    """Whether a reader counts: the checks that export adds read a value and give none."""
    return user.target is not aten._assert_tensor_metadata.default and user.meta.get(NODE_KEY, -1) not in inside


def writes_in_place(numbers: Iterable[int], provenance: Provenance) -> fx.Node | None:
    """The first exported node among these that changes in place a tensor that is not made among these."""
    inside = frozenset(numbers)
    for number in sorted(inside):
        node = provenance._nodes.get(number)
        schema = getattr(getattr(node, "target", None), "_schema", None)
        if node is None or schema is None or not schema.is_mutable:
            continue
        written = [
            value
            for argument, value in zip(schema.arguments, node.args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written or not all(_is_made_inside(value, inside) for value in written):
            return node
    return None


def _is_made_inside(value: Any, inside: frozenset[int]) -> bool:
    """Whether the memory of a value was allocated among these nodes."""
    while isinstance(value, fx.Node) and value.meta.get(NODE_KEY, -1) in inside:
        schema = getattr(value.target, "_schema", None)
        if schema is None:
            return False
        aliased = [
            argument
            for declared, argument in zip(schema.arguments, value.args, strict=False)
            if declared.alias_info is not None
        ]
        if not aliased:
            return all(result.alias_info is None for result in schema.returns) and value.target not in _MAY_ALIAS
        value = aliased[0]
    return False


def _same_type(left: fx.Node, right: fx.Node) -> bool:
    a, b = left.meta.get("val"), right.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype
