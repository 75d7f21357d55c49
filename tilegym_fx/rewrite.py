"""Plan -> rewritten graph: one op call for each chosen Match.

Every new node carries its Definition's name in ``meta["tilegym_fx"]``. The order of in-place writes, and of
reads of what they write, is kept.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence

import networkx as nx
import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from . import ops
from .errors import RewriteError
from .normalize import pin_products
from .normalize.aliasing import Writes, written_args
from .results import Match, Plan


def rewrite(graph: Graph, plan: Plan) -> int:
    """Replace every chosen Match in place, and pin what grouped products that stay demand of strides.

    Returns:
        The number of op calls written.

    Raises:
        RewriteError: If the result would not be a valid graph.
    """
    order = {node: float(i) for i, node in enumerate(graph.nodes)}
    now: dict[Node, Node] = {}  # an output that was replaced -> what stands for it
    for planned in plan.chosen:
        now.update(_replace(graph, planned.match, order, now))
    if plan.chosen:
        _erase_unread(graph, {node for planned in plan.chosen for node in planned.match.shared})
        _sort(graph, order)
    pin_products(graph)
    graph.lint()
    return len(plan.chosen)


def _erase_unread(graph: Graph, shared: set[Node]) -> None:
    """What stayed for another reader goes if that was another region."""
    for node in reversed(graph.nodes):
        if node in shared and not node.users:
            graph.erase_node(node)


def _replace(graph: Graph, match: Match, order: dict[Node, float], now: dict[Node, Node]) -> dict[Node, Node]:
    last = match.nodes[-1]
    arguments = tuple(now.get(v, v) if isinstance(v, Node) else v for v in match.inputs.values())
    with graph.inserting_after(last):
        call = graph.call_function(_op_of(match), arguments)
    outputs = [node for i, node in enumerate(match.outputs) if i not in match.written]
    values = tuple(n.meta["val"] for n in outputs)
    call.meta = _meta(match.outputs[0], match, values[0] if len(values) == 1 else values or None)
    order[call] = order[last]
    results = [call] if len(outputs) == 1 else _items(graph, call, match, outputs, order)
    for old, new in zip(outputs, results, strict=True):
        new.meta["origins"] = old.meta.get("origins", ())
    stands_for = {**dict(zip(outputs, results, strict=True)), **_memory(match, arguments)}
    for old, new in stands_for.items():
        old.replace_all_uses_with(new)
    for node in reversed(match.nodes):
        if node.users:
            raise RewriteError(f"{node.name} of {match.definition} is still read by {next(iter(node.users)).name}")
        graph.erase_node(node)
    return stands_for


def _memory(match: Match, arguments: Sequence[object]) -> dict[Node, Node]:
    """The outputs that are written over inputs, and these inputs."""
    given = dict(zip(match.inputs, arguments, strict=True))
    pairs = ((match.outputs[i], given[name]) for i, name in match.written.items())
    return {output: value for output, value in pairs if isinstance(value, Node)}


def _op_of(match: Match) -> OpOverload:
    """The op that gives all results, or the one that writes some of them where the author's code did."""
    return ops.writing_overload(match.definition, match.written) if match.written else ops.overload(match.definition)


def _items(graph: Graph, call: Node, match: Match, outputs: Sequence[Node], order: dict[Node, float]) -> list[Node]:
    items: list[Node] = []
    for i, old in enumerate(outputs):
        with graph.inserting_after(items[-1] if items else call):
            item = graph.call_function(operator.getitem, (call, i))
        item.meta = _meta(old, match, old.meta["val"])
        order[item] = order[call]
        items.append(item)
    return items


def _meta(like: Node, match: Match, value: object) -> dict[str, object]:
    kept: dict[str, object] = {k: like.meta[k] for k in ("nn_module_stack", "stack_trace") if k in like.meta}
    fresh = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.contiguous(), value)
    return {**kept, "val": fresh, "tilegym_fx": match.definition}


def _sort(graph: Graph, order: dict[Node, float]) -> None:
    """Stable topological order by data, and by time around writes in place."""
    dependencies = nx.DiGraph()
    dependencies.add_nodes_from(graph.nodes)
    for node in graph.nodes:
        dependencies.add_edges_from((source, node) for source in node.all_input_nodes)
    _arrange(graph, dependencies, order)
    writes = Writes(graph)  # which reads a graph in order
    if writes:
        dependencies.add_edges_from(_in_time(sorted(graph.nodes, key=order.__getitem__), writes))
        _arrange(graph, dependencies, order)


def _in_time(timed: Sequence[Node], writes: Writes) -> Iterator[tuple[Node, Node]]:
    """Who must run before whom: a write after all earlier uses of its memory, and before all later ones."""
    write: dict[Node, Node] = {}
    uses: dict[Node, list[Node]] = defaultdict(list)
    for node in timed:
        written = {root for arg in written_args(node) for root in writes.roots(arg)}
        used = {root for value in (node, *node.all_input_nodes) for root in writes.roots(value)}
        for root in used:
            if root in write and write[root] is not node:
                yield write[root], node
            if root in written:
                yield from ((use, node) for use in uses.pop(root, ()))
                write[root] = node
            else:
                uses[root].append(node)


def _arrange(graph: Graph, dependencies: nx.DiGraph, order: dict[Node, float]) -> None:
    rank = {node: i for i, node in enumerate(sorted(graph.nodes, key=_rank(order)))}
    try:
        sorted_nodes = list(nx.lexicographical_topological_sort(dependencies, key=rank.__getitem__))
    except nx.NetworkXUnfeasible as error:
        raise RewriteError("two replaced regions need each other's result, or a write comes between") from error
    anchor = sorted_nodes[0]
    for node in sorted_nodes[1:]:
        if anchor._next is not node:
            anchor.append(node)
        anchor = node


def _rank(order: dict[Node, float]):  # type: ignore[no-untyped-def]
    return lambda node: (node.op == "output", node.op != "placeholder", order[node])
