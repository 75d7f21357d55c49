"""Editing an ATen graph so that values keep their meta and their origins.

``node.meta["origins"]`` holds the names of the exported nodes whose *value* the node has: an edit that puts
an equal value in another place carries them over, an edit that drops a value drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

#: Functions that turn gradients or autocast on or off for what follows.
MODE_SWITCHES = {
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}

#: A pass takes the graph, edits it in place and returns how many edits it made.
GraphPass = Callable[[Graph], int]


def val(node: Node) -> Any:
    """The fake tensor (or SymInt, or tuple of them) that the node computes."""
    return node.meta.get("val")


def args_of(node: Node) -> tuple[Any, ...]:
    """The node's positional arguments; which types they have is the op's affair."""
    return node.args


def calls(graph: Graph, targets: Sequence[Any] | set[Any]) -> Iterator[Node]:
    """The call_function nodes with one of these targets, in graph order; safe to edit while iterating."""
    wanted = set(targets)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in wanted:
            yield node


def switches_mode(node: Node) -> bool:
    """Whether the call turns gradients or autocast on or off for what follows."""
    return node.op == "call_function" and node.target in MODE_SWITCHES


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def same_device(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device


def take_over(old: Node, new: Node) -> None:
    """Let ``new`` stand wherever ``old`` stood: users and origins. ``old`` is erased."""
    new.meta["origins"] = tuple(dict.fromkeys((*new.meta.get("origins", ()), *old.meta.get("origins", ()))))
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def insert(before: Node, target: Any, args: tuple[Any, ...], value: Any, like: Node | None = None) -> Node:
    """A new call before ``before``; provenance meta comes from ``like`` (default: ``before``)."""
    source = like or before
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, args)
    new.meta = {k: v for k, v in source.meta.items() if k in ("nn_module_stack", "stack_trace", "site")}
    new.meta["val"] = value
    new.meta["origins"] = ()
    return new


def replace(node: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """Put another call with the same value in the node's place."""
    new = insert(node, target, args, val(node))
    take_over(node, new)
    return new


def fake_call(target: Any, args: tuple[Any, ...]) -> Any:
    """What ``target`` gives on the fake values of ``args``."""
    values = torch.fx.map_arg(args, val)
    mode = next((v.fake_mode for v in torch.utils._pytree.tree_leaves(values) if hasattr(v, "fake_mode")), None)
    if mode is None:
        return target(*values)
    with mode:
        return target(*values)


def size_args(node: Node, shape: Sequence[Any], source: Node) -> list[Any] | None:
    """``shape`` as a reshape's arguments before ``node``: ints, ``source``'s sizes, at most one -1."""
    out: list[Any] = []
    source_shape = val(source).shape
    for size in shape:
        if isinstance(size, int):
            out.append(size)
            continue
        dim = next((d for d, s in enumerate(source_shape) if not isinstance(s, int) and same_size(s, size)), None)
        if dim is not None:
            out.append(insert(node, aten.sym_size.int, (source, dim), size))
        elif -1 not in out:
            out.append(-1)
        else:
            return None
    return out


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same symbolic expression (no guard is added)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return size_key(a) == size_key(b)


def size_key(size: Any) -> Any:
    """A hashable stand-in for an int or SymInt: equal keys are equal sizes; never installs a guard."""
    if isinstance(size, torch.SymInt):
        return str(size.node.expr)
    return size


def shape_key(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size_key(s) for s in shape)
