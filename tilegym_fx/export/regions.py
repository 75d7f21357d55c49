"""Makes a captured graph one flat list of operations: regions inlined, traces of the capture itself gone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
#: How a constant that a model makes of a literal enters a graph: the first on meta, the second elsewhere.
_LIFTS = frozenset({aten.detach_.default, aten.lift_fresh_copy.default})
_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
#: Operator that wraps a region -> index of the region among its arguments.
_REGIONS: dict[Any, int] = {_GRAD_MODE: 1, _AUTOCAST: 4}


def flatten_regions(graph_module: GraphModule) -> int:
    """Replace regions that set the grad mode, or that switch autocast off, by the nodes in them, in place.

    Graphs are for inference, so the grad mode does not matter. A region under autocast stays one node:
    autocast makes its casts when it runs, they are no nodes of the graph.

    Returns:
        How many regions there were.
    """
    graph, count = graph_module.graph, 0
    while wrapped := [node for node in graph.nodes if _can_be_inlined(node)]:
        for node in wrapped:
            _inline(graph_module, node)
        count += len(wrapped)
    if count:
        graph_module.delete_all_unused_submodules()
        graph.lint()
        graph_module.recompile()
    return count


def _can_be_inlined(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _REGIONS:
        return False
    return node.target is not _AUTOCAST or node.args[2] is False


def _inline(graph_module: GraphModule, node: Node) -> None:
    at = _REGIONS[node.target]
    body_node, operands = node.args[at], iter(node.args[at + 1 :])
    assert isinstance(body_node, Node)
    body = graph_module.get_submodule(str(body_node.target))
    assert isinstance(body, GraphModule)
    copies: dict[Node, Any] = {}
    result: Any = None
    with graph_module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(operands)
            elif inner.op == "output":
                result = map_arg(inner.args[0], copies.__getitem__)
            else:
                copies[inner] = _copy(graph_module, body, inner, copies)
    _use_instead(node, result)
    if not body_node.users:
        graph_module.graph.erase_node(body_node)


def _copy(graph_module: GraphModule, body: GraphModule, inner: Node, copies: dict[Node, Any]) -> Node:
    copy = graph_module.graph.node_copy(inner, copies.__getitem__)
    if inner.op == "get_attr":
        copy.target = f"_inlined_{copy.name}"
        setattr(graph_module, copy.target, attrgetter(str(inner.target))(body))
    return copy


def _use_instead(node: Node, result: Any) -> None:
    """Give the users of a region, which read single results or the one there is, the inlined values."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def drop_capture_noise(graph_module: GraphModule) -> int:
    """Remove, in place, what only the capture put there: empty first parts of a cache, detached constants.

    The first update of a cache is ``cat([empty, x])``, whose empty part is a constant: it becomes ``x``.

    Returns:
        How many nodes were removed.
    """
    graph = graph_module.graph
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        filled = [part for part in node.args[0] if not _is_empty(part)]
        if len(filled) == 1 < len(node.args[0]):
            count += _replace(node, filled[0])
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        constant = node.all_input_nodes[0]
        if constant.op != "call_function" or constant.target in _LIFTS:
            count += _replace(node, constant)
    if count:
        graph_module.recompile()
    return count


def _replace(node: Node, same: Node) -> int:
    """Put one value in the place of another; that one goes, and so do constants that only it read."""
    operands = node.all_input_nodes
    node.replace_all_uses_with(same)
    node.graph.erase_node(node)
    gone = 1
    for operand in operands:
        if operand.op == "call_function" and not operand.users and operand.target in _LIFTS:
            gone += _replace(operand, operand.all_input_nodes[0])
    return gone


def _is_empty(node: Node) -> bool:
    """Whether a value has the shape [0], which ``cat`` takes beside any other shape."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return False
    size = value.shape[0]
    return isinstance(size, int) and size == 0  # a size that only the data tell is not looked at
