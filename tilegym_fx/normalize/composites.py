"""A pass that writes a whole operation of PyTorch as the arithmetic that it is composed of, rounding for rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .casts import CAST
from .edit import aten, calls, fake_call, insert, is_tensor, take_over, val

_HALVES = (torch.bfloat16, torch.float16)


def plain_rms_norm(graph: Graph) -> int:
    """``rms_norm`` becomes its arithmetic: halves and their weight are computed with in float32 and rounded once."""
    changed = 0
    for node in calls(graph, {aten.rms_norm.default}):
        source, sizes, weight, eps = (*node.args, None, None)[:4]
        if not isinstance(source, Node) or not val(source).dtype.is_floating_point or not isinstance(sizes, list):
            continue
        new = _normalized(node, source, len(sizes), eps)
        if is_tensor(val(weight) if isinstance(weight, Node) else None):
            new = _before(node, aten.mul.Tensor, new, weight)
        take_over(node, new if val(new).dtype == val(node).dtype else _before(node, CAST, new, val(node).dtype))
        changed += 1
    return changed


def _normalized(node: Node, source: Node, axes: int, eps: Any) -> Node:
    """The last axes of a value over the root of their mean square."""
    wide = _before(node, CAST, source, torch.float32) if val(source).dtype in _HALVES else source
    square = _before(node, aten.mul.Tensor, wide, wide)
    mean = _before(node, aten.mean.dim, square, list(range(-axes, 0)), True)
    number = torch.finfo(val(wide).dtype).eps if eps is None else eps
    root = _before(node, aten.rsqrt.default, _before(node, aten.add.Tensor, mean, number))
    return _before(node, aten.mul.Tensor, wide, root)


def _before(node: Node, target: Any, *args: Any) -> Node:
    return insert(node, target, args, fake_call(target, args))
