"""Where a graph shows the strides of its values: to its caller, and to code outside ATen.

The normal form drops copies, which may change strides. A graph that is to run pins first those that somebody
sees.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .edit import aten, insert, size_key, val

#: Ops of ATen whose result depends on strides, or that demand some.
_READS_STRIDES = {
    aten.as_strided.default,
    aten.view_as_complex.default,
    aten.view.dtype,
    aten._scaled_mm.default,
}
#: Dense in row order whatever the strides of what they read.
_DENSE = {aten.linear.default, aten.mm.default, aten.addmm.default, aten.matmul.default, aten.embedding.default}
#: Views and casts, none of which the normal form drops for being a copy.
_VIEWS = {
    aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints, aten.transpose.int,
    aten.permute.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
    aten.narrow.default, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, operator.getitem,
}  # fmt: skip
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}


def pin_layouts(graph: Graph) -> int:
    """Put a ``contiguous`` before everything that can tell, where the value is contiguous now.

    It costs nothing where the value still is. Normalisation leaves it in place.

    Returns:
        The number of values pinned.
    """
    pinned = 0
    for reader in list(graph.nodes):
        if not _sees_strides(reader):
            continue
        for source in reader.all_input_nodes:
            if reader.target is aten.view_as_complex.default and _has_its_strides(source):
                continue
            if source.op == "call_function" and is_contiguous(val(source)):
                pin = insert(reader, aten.contiguous.default, (source,), val(source))
                pin.meta["pinned"] = True
                reader.replace_input_with(source, pin)
                pinned += 1
    return pinned


def _has_its_strides(node: Node) -> bool:
    """Whether a value is seen through views and casts alone, so that no copy decides its strides."""
    while node.op == "call_function" and node.target not in _DENSE:
        is_cast = node.target in _CASTS and node.kwargs.get("memory_format") is None and len(node.args) < 4
        if not (is_cast or node.target in _VIEWS) or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def is_contiguous(value: Any) -> bool:
    """Whether a fake tensor is dense in row order, read off its symbolic strides without adding a guard."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size_key(stride) != size_key(expected) and size_key(size) != 1:
            return False
        expected = expected * size
    return True


def _sees_strides(node: Node) -> bool:
    if node.op == "output" or node.target in _READS_STRIDES:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")
