"""Passes that bring dtype changes to one form: ``aten.to.dtype``, only where the dtype really changes."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .aliasing import Writes
from .edit import aten, calls, fake_call, insert, is_tensor, replace, same_device, take_over, val

CAST = aten.to.dtype
_CASTS = {
    CAST,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}
_PROMOTING = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def one_cast(graph: Graph) -> int:
    """Every conversion that only changes the dtype becomes ``to.dtype``; those that change nothing go."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, _CASTS):
        source = node.args[0]
        if not isinstance(source, Node) or not is_tensor(val(source)) or not same_device(val(source), val(node)):
            continue
        if val(source).layout != val(node).layout or writes.touched(node):
            continue
        if val(source).dtype == val(node).dtype:
            if not _is_copy(node) or writes.may_stand_for(source, node):
                take_over(node, source)
                changed += 1
        elif node.target is not CAST or len(node.args) > 2 or node.kwargs:
            replace(node, CAST, (source, val(node).dtype))
            changed += 1
    return changed


def _is_copy(node: Node) -> bool:
    """Whether the conversion gives new memory even where it changes nothing."""
    if node.target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return True
    return any(a is True for a in (*node.args[2:], *node.kwargs.values()))


def drop_round_trips(graph: Graph) -> int:
    """``x.to(wider).to(x.dtype)`` is ``x``, bit for bit."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, {CAST}):
        wide = node.args[0]
        if not isinstance(wide, Node) or wide.target is not CAST or not isinstance(wide.args[0], Node):
            continue
        source = wide.args[0]
        if not writes.may_stand_for(source, node):
            continue
        if val(source).dtype == val(node).dtype and _holds(val(wide).dtype, val(source).dtype):
            take_over(node, source)
            changed += 1
    return changed


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    return torch.promote_types(wide, narrow) == wide


def explicit_promotion(graph: Graph) -> int:
    """Write down the cast that a mixed-dtype add, sub, mul or div does silently."""
    changed = 0
    for node in calls(graph, _PROMOTING):
        result = val(node).dtype
        for i, arg in enumerate(node.args[:2]):
            if isinstance(arg, Node) and _is_promoted(val(arg), result):
                cast = insert(node, CAST, (arg, result), fake_call(CAST, (arg, result)))
                node.update_arg(i, cast)
                changed += 1
    return changed


def _is_promoted(value: object, result: torch.dtype) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return value.dtype != result and value.dtype.is_floating_point and result.is_floating_point


def one_softmax(graph: Graph) -> int:
    """``softmax(x.to(wider))`` becomes ``softmax(x, dtype=wider)``; the dtype that ``x`` has is left out."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, {aten.softmax.int}):
        source, dim, dtype = (*node.args, None)[:3]
        if not isinstance(source, Node) or node.kwargs:
            continue
        cast = source.args[0] if source.target is CAST else None
        if dtype is None and isinstance(cast, Node) and writes.may_stand_for(cast, source):
            if _holds(val(source).dtype, val(cast).dtype):
                replace(node, aten.softmax.int, (cast, dim, val(source).dtype))
                changed += 1
        elif dtype is not None and dtype == val(source).dtype:
            replace(node, aten.softmax.int, (source, dim))
            changed += 1
    return changed
