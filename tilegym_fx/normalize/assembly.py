"""A pass that brings arrays that are filled part by part to one form."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import Writes
from .casts import CAST
from .edit import aten, calls, fake_call, insert, is_tensor, shape_key, take_over, val

_NEW = {
    aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default, aten.new_zeros.default,
    aten.zeros.default, aten.zeros_like.default,
}  # fmt: skip


def one_cat(graph: Graph) -> int:
    """``new = empty(...); new[..., :n] = a; new[..., n:] = b`` becomes ``cat((a, b), -1)`` with the same values."""
    found = list(calls(graph, _NEW))
    if not found:
        return 0
    position = {node: i for i, node in enumerate(graph.nodes)}
    writes = Writes(graph)
    return sum(_assembled(node, position, writes) for node in found)


def _assembled(node: Node, position: dict[Node, int], writes: Writes) -> int:
    copies = [_copy_into(user) for user in node.users if user.target is aten.slice.Tensor]
    parts = [copy for copy in copies if copy is not None]
    if len(parts) < 2 or len(parts) != len(copies) or not is_tensor(val(node)):
        return 0
    last = max(parts, key=position.__getitem__)
    if any(writes.epoch(_source(copy), copy) != writes.epoch(_source(copy), last) for copy in parts):
        return 0  # what was copied is no more there when the last part is
    slices = [user for user in node.users if user.target is aten.slice.Tensor]
    if any(position[user] < position[last] for user in node.users if user not in slices):
        return 0
    placed = _in_order(parts, val(node))
    if placed is None:
        return 0
    dim, ordered = placed
    pieces = [_fitted(copy, val(node).dtype, last) for copy in ordered]
    whole = insert(last, aten.cat.default, (pieces, dim), val(node), like=node)
    written = tuple(name for copy in parts for name in copy.meta.get("origins", ()))
    for copy in parts:
        node.graph.erase_node(copy)
    for part in slices:
        node.graph.erase_node(part)
    take_over(node, whole)
    whole.meta["origins"] = (*whole.meta["origins"], *written)
    return 1


def _copy_into(part: Node) -> Node | None:
    """The one use of a slice, if a value is copied there and nobody reads what the copy gives."""
    if len(part.users) != 1:
        return None
    user = next(iter(part.users))
    is_copy = user.target is aten.copy_.default and user.args[0] is part and not user.users
    return user if is_copy and isinstance(user.args[1], Node) and is_tensor(val(user.args[1])) else None


def _source(copy: Node) -> Node:
    source: Any = copy.args[1]
    assert isinstance(source, Node)
    return source


def _in_order(copies: list[Node], whole: torch.Tensor) -> tuple[int, list[Node]] | None:
    """The dimension along which slices cover all of an array, each place once, and the copies in that order."""
    bounds = {copy: _bounds(copy.args[0], whole) for copy in copies}
    dims = {found[0] for found in bounds.values() if found is not None}
    if len(dims) != 1 or None in bounds.values():
        return None
    dim = dims.pop()
    ordered = sorted(copies, key=lambda copy: bounds[copy][1])  # type: ignore[index]
    end = 0
    for copy in ordered:
        if bounds[copy][1] != end:  # type: ignore[index]
            return None
        end = bounds[copy][2]  # type: ignore[index]
    return (dim, ordered) if end == whole.shape[dim] else None


def _bounds(part: Any, whole: torch.Tensor) -> tuple[int, int, int] | None:
    """Dimension, counted from the end, first and last index of a slice; None where a step or a symbol is in it."""
    _, dim, start, end, step = (*part.args, *(None, 0, None, None, 1)[len(part.args) :])[:5]
    size = whole.shape[dim]
    if step != 1 or not all(isinstance(v, int | None) for v in (start, end)) or not isinstance(size, int):
        return None
    first, last, _ = slice(start, end).indices(size)
    return (dim if dim < 0 else dim - whole.dim()), first, last


def _fitted(copy: Node, dtype: torch.dtype, before: Node) -> Node:
    """What is copied, in the dtype and the shape that it has where it is copied to."""
    piece, shape = _source(copy), val(copy.args[0]).shape  # type: ignore[arg-type]
    if val(piece).dtype != dtype:
        piece = insert(before, CAST, (piece, dtype), fake_call(CAST, (piece, dtype)))
    if shape_key(val(piece).shape) != shape_key(shape):
        args = (piece, list(shape))
        piece = insert(before, aten.expand.default, args, fake_call(aten.expand.default, args))
    return piece
