"""A pass that drops what guards against indices that there cannot be."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import Writes
from .edit import aten, calls, is_tensor, shape_key, take_over, val

#: Ops that keep or rearrange the numbers of their first argument.
_MOVES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.contiguous.default,
    aten.clone.default, aten.alias.default,
}  # fmt: skip
_SORTS = {aten.sort.default, aten.sort.stable}


def drop_range_guards(graph: Graph) -> int:
    """Clamps and fills for indices beyond the last go where the indices are those of a ``topk`` over as many values.

    transformers 5.17 guards so against the experts of other processes, which have the number after the last.
    """
    found = list(calls(graph, {aten.masked_fill.Scalar, aten.clamp.default}))
    writes = Writes(graph) if found else None
    changed = 0
    for node in found:
        source = node.args[0]
        if writes is None or not isinstance(source, Node) or not writes.may_stand_for(source, node):
            continue
        if _changes_nothing(node, source, writes) and _is_like(source, node):
            take_over(node, source)
            changed += 1
    return changed


def _changes_nothing(node: Node, source: Node, writes: Writes) -> bool:
    if node.target is aten.masked_fill.Scalar:
        return isinstance(node.args[1], Node) and _is_never(node.args[1], writes)
    least, most = (*node.args[1:], None, None)[:2]
    bound = _bound(source, writes)
    return least is None and isinstance(most, int) and bound is not None and bound <= most + 1


def _is_like(source: Node, node: Node) -> bool:
    before, after = val(source), val(node)
    return bool(before.dtype == after.dtype and shape_key(before.shape) == shape_key(after.shape))


def _is_never(mask: Node, writes: Writes) -> bool:
    """Whether a mask is False everywhere: indices that are compared with a number beyond them."""
    while mask.target in _MOVES and isinstance(mask.args[0], Node) and not writes.touched(mask):
        mask = mask.args[0]
    if mask.target is not aten.ge.Scalar or writes.touched(mask):
        return False
    indices, number = mask.args[:2]
    bound = _bound(indices, writes) if isinstance(indices, Node) else None
    return bound is not None and isinstance(number, int) and bound <= number


def _bound(node: Node, writes: Writes) -> int | None:
    """A number that all of a value's integers are less than, if they come from a ``topk``."""
    while not writes.touched(node) and is_tensor(val(node)) and val(node).dtype == torch.int64:
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, Node):
            return None
        if node.target is operator.getitem and source.target is aten.topk.default and node.args[1] == 1:
            return _entries(source)
        is_sorted = node.target is operator.getitem and source.target in _SORTS and node.args[1] == 0
        if not is_sorted and node.target not in _MOVES:
            return None
        node = source.args[0] if is_sorted else source  # type: ignore[assignment]
    return None


def _entries(topk: Node) -> int | None:
    """How many values a ``topk`` chooses among."""
    given = dict(zip(("dim",), topk.args[2:3], strict=False)) | topk.kwargs
    dim = given.get("dim", -1)
    values = topk.args[0]
    shape = val(values).shape if isinstance(values, Node) else ()
    size = shape[dim] if shape and isinstance(dim, int) else None  # a single number has no dimensions
    return size if isinstance(size, int) else None
