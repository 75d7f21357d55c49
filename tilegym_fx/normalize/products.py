"""The strides that grouped products demand of their matrices: one dimension packed, steps of whole 16 bytes.

The normal form drops copies, and with them strides that an author took care of. They are noted before it, and given
back when a plan has been carried out: routed experts hold two such products, which a pin between them would hide.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import MAY_ALIAS
from .edit import aten, fake_call, insert, val
from .layouts import is_contiguous

_NOTE = "layouts"
_ROWS, _COLUMNS = "rows", "columns"
#: Bytes of which every step but the packed one is a multiple.
_ALIGNED = 16
_ENDS = 2


def note_products(graph: Graph) -> int:
    """Write down which of the tensors of grouped products owe their strides to what computes them, and which way.

    What is seen through views alone keeps its strides in the normal form, and is not noted.

    Returns:
        The number of tensors noted.
    """
    noted = 0
    for product in graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        places = enumerate((*product.args, *([product.kwargs.get("offs")] * (len(product.args) == _ENDS))))
        found = {i: _way(val(arg)) for i, arg in places if isinstance(arg, Node) and not _is_given(arg)}
        product.meta[_NOTE] = found
        noted += len(found)
    return noted


def pin_products(graph: Graph) -> int:
    """Lay out what `note_products` has noted of every grouped product that is still there.

    Where the strides are right as they are, only a copy that copies nothing is added.

    Returns:
        The number of tensors pinned.
    """
    pinned = 0
    for product in graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        for place, way in product.meta.get(_NOTE, {}).items():
            source = product.args[place]
            if isinstance(source, Node):
                product.update_arg(place, _laid_out(product, source, way))
                pinned += 1
    return pinned


def _is_given(node: Node) -> bool:
    """Whether a value comes from outside of the graph, if need be through views."""
    while _is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op != "call_function"


def _is_view(node: Node) -> bool:
    """Whether the call never makes memory, nor writes any: what writes may have a copy's strides later."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or node.target in MAY_ALIAS:
        return False
    return any(result.alias_info is not None for result in schema.returns)


def _way(value: torch.Tensor) -> str:
    return _COLUMNS if value.dim() > 1 and not is_contiguous(value) and is_contiguous(value.mT) else _ROWS


def _laid_out(product: Node, source: Node, way: str) -> Node:
    """The value packed along its rows or its columns."""

    def call(target: Any, *args: Any) -> Node:
        return insert(product, target, args, fake_call(target, args))

    if way == _COLUMNS:
        source = call(aten.transpose.int, source, -2, -1)
    width = val(source).shape[-1] if val(source).dim() else 0
    lacking = -width % (_ALIGNED // val(source).itemsize) if isinstance(width, int) and val(source).dim() > 1 else 0
    if lacking:  # then it was part of something wider
        padded = call(aten.constant_pad_nd.default, source, [0, lacking])
        source = call(aten.slice.Tensor, padded, -1, 0, width)
    else:
        source = call(aten.contiguous.default, source)
    return call(aten.transpose.int, source, -2, -1) if way == _COLUMNS else source
