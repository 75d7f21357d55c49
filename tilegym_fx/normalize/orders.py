"""Passes that bring orders of a dimension to one form."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .edit import aten, calls, is_tensor, replace, same_size, val

_NEW = {aten.empty_like.default, aten.zeros_like.default, aten.empty.memory_format, aten.zeros.default}
_SORTS = {aten.sort.default, aten.sort.stable}


def sorted_topk(graph: Graph) -> int:
    """``topk(sorted=False)`` becomes ``topk``: in an order that is left open, the best may well come first."""
    changed = 0
    for node in calls(graph, {aten.topk.default}):
        given = dict(zip(("dim", "largest", "sorted"), node.args[2:], strict=False)) | node.kwargs
        if given.get("sorted", True) is False:
            args = (*node.args[:2], given.get("dim", -1), given.get("largest", True))
            node.args, node.kwargs = args, {}
            changed += 1
    return changed


def one_inverse(graph: Graph) -> int:
    """``inverse[order] = arange(n)``, where ``order`` is that of a sort, becomes ``argsort(order)``."""
    changed = 0
    for node in calls(graph, {aten.index_put_.default, aten.index_put.default}):
        target, indices, values = node.args[:3]
        if len(node.args) > 3 or node.kwargs or not isinstance(indices, list | tuple) or len(indices) != 1:
            continue
        order = indices[0]
        if isinstance(order, Node) and _is_order(order) and _is_new(target, node, order) and _counts_up(values, order):
            replace(node, aten.argsort.default, (order,))
            changed += 1
    return changed


def _is_order(node: Node) -> bool:
    """Whether a value is the permutation that a one-dimensional sort made."""
    if not is_tensor(val(node)) or val(node).dim() != 1:
        return False
    if node.target is not operator.getitem:
        return node.target is aten.argsort.default
    source = node.args[0]
    return isinstance(source, Node) and source.target in _SORTS and bool(node.args[1] == 1)


def _is_new(target: Any, node: Node, order: Node) -> bool:
    """Whether all of the target is overwritten and nobody else reads it."""
    if not isinstance(target, Node) or target.target not in _NEW or list(target.users) != [node]:
        return False
    value = val(target)
    is_like = value.dtype == torch.int64 and value.dim() == 1
    return bool(is_like and same_size(value.shape[0], val(order).shape[0]))


def _counts_up(values: Any, order: Node) -> bool:
    if not isinstance(values, Node) or values.target is not aten.arange.default:
        return False
    return bool(val(values).dtype == torch.int64 and same_size(val(values).shape[0], val(order).shape[0]))
