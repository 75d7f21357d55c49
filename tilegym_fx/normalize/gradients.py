"""Where the author of a graph cut the gradient: ``detach``, and what is computed under ``no_grad``.

The normal form puts equal values in each other's place. A gradient goes through them all the same only if none of
them is cut, so a graph that runs says first where they are: by a ``detach`` at each cut, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import Writes
from .edit import aten, calls, val

_SWITCH: Any = torch._C._set_grad_enabled


def pin_gradients(graph: Graph, enabled: bool) -> int:
    """Put a ``detach`` behind every value that ``no_grad`` cuts off; one that cuts nothing becomes an alias.

    Args:
        graph: An ATen graph whose placeholders may say in ``meta["requires_grad"]`` whether a gradient is wanted.
        enabled: Whether gradients are on where the graph starts.

    Returns:
        How many nodes were changed.
    """
    off = without_gradients(graph, enabled)
    anywhere = enabled or any(node.args[0] for node in calls(graph, {_SWITCH}))
    writes = Writes(graph)
    reached: set[Node] = set()  # values through which a gradient would go, were gradients on everywhere
    changed = 0

    def reaches(source: Node) -> bool:
        return source in reached or (anywhere and writes.touched(source))

    for node in list(graph.nodes):
        if node.target is aten.detach.default:
            if not any(map(reaches, node.all_input_nodes)):
                node.target = aten.alias.default
                changed += 1
        elif anywhere and (_starts(node) or (_passes_on(node) and any(map(reaches, node.all_input_nodes)))):
            reached.add(node)
            if node in off and differentiable(val(node)) and not writes.touched(node):
                changed += _cut(node, off)
    return changed


def _starts(node: Node) -> bool:
    if node.op == "get_attr":
        return bool(getattr(_held(node), "requires_grad", False))
    return node.op == "placeholder" and differentiable(val(node)) and bool(node.meta.get("requires_grad", True))


def _passes_on(node: Node) -> bool:
    return node.op == "call_function" and (differentiable(val(node)) or not isinstance(val(node), torch.Tensor))


def _held(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _cut(node: Node, off: set[Node]) -> int:
    """Readers outside of ``no_grad`` read the value through a ``detach``."""
    readers = [user for user in node.users if user not in off]
    if not readers:
        return 0
    with node.graph.inserting_after(node):
        cut = node.graph.call_function(aten.detach.default, (node,))
    cut.meta = {**node.meta, "origins": ()}
    for reader in readers:
        reader.replace_input_with(node, cut)
    return 1


def without_gradients(graph: Graph, enabled: bool = True) -> set[Node]:
    """The calls that run while gradients are off, and the output if they are off at the end.

    Args:
        graph: The graph.
        enabled: Whether they are on where it starts.
    """
    off: set[Node] = set()
    for node in graph.nodes:
        if node.target is _SWITCH:
            enabled = bool(node.args[0])
        elif not enabled and node.op in ("call_function", "output"):
            off.add(node)
    return off


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor of a dtype that can have a gradient."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
