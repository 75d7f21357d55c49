"""A pass that drops in-place writes to values that nobody else sees."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import MAY_ALIAS
from .edit import aten, calls, fake_call, is_tensor, replace, same_size, val
from .gradients import without_gradients

_FUNCTIONAL: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.add_.Scalar: aten.add.Scalar,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
    aten.clamp_.default: aten.clamp.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.relu_.default: aten.relu.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.silu_.default: aten.silu.default,
    aten.tanh_.default: aten.tanh.default,
    aten.scatter_.value: aten.scatter.value,
    aten.scatter_.src: aten.scatter.src,
    aten.index_put_.default: aten.index_put.default,
}


def drop_needless_writes(graph: Graph) -> int:
    """``x.add_(y)`` becomes ``x + y`` where ``x`` is new and nobody reads it afterwards.

    Not where the graph turns gradients off: the sum would have none, what is written in place keeps its own.
    """
    found = list(calls(graph, set(_FUNCTIONAL)))
    kept = without_gradients(graph) if found else set()
    position = {node: i for i, node in enumerate(graph.nodes)} if found else {}
    changed = 0
    for node in found:
        old = node.args[0]
        if node in kept or not isinstance(old, Node) or node.kwargs or not _is_new(old):
            continue
        if not all(user is node or _has_read(user, position, node) for user in old.users):
            continue
        if _gives_the_same(_FUNCTIONAL[node.target], node):
            replace(node, _FUNCTIONAL[node.target], node.args)
            changed += 1
    return changed


def _has_read(user: Node, position: dict[Node, int], writer: Node) -> bool:
    """Whether a reader is done before the write and keeps no view of what it read."""
    is_cast = user.target is aten.to.dtype and val(user).dtype != val(user.args[0]).dtype  # type: ignore[arg-type]
    return position.get(user, len(position)) < position[writer] and (is_cast or _makes_memory(user.target))


def _is_new(node: Node) -> bool:
    """Whether a value has memory of its own."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        parts = node.args[0]
        alone = isinstance(parts, Node) and sum(u.args[1:] == node.args[1:] for u in parts.users) == 1
        return alone and isinstance(parts, Node) and _makes_memory(parts.target)
    return _makes_memory(node.target)


def _makes_memory(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target in MAY_ALIAS:
        return False
    schema = target._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


def _gives_the_same(target: Any, node: Node) -> bool:
    """Whether the functional op has the dtype and the shape of the value that was written to."""
    value, result = val(node), fake_call(target, node.args)
    return (
        is_tensor(value)
        and value.dtype == result.dtype
        and value.dim() == result.dim()
        and all(same_size(a, b) for a, b in zip(value.shape, result.shape, strict=True))
    )
