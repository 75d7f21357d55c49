"""Passes that bring one piece of arithmetic to one form, bit for bit (rsqrt: to the last place)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliasing import Writes
from .edit import args_of, aten, calls, fake_call, insert, is_tensor, replace, take_over, val

_SCALAR_FORMS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}


def tensor_overloads(graph: Graph) -> int:
    """``mul.Scalar`` and its like become ``mul.Tensor`` with a number."""
    changed = 0
    for node in calls(graph, set(_SCALAR_FORMS)):
        if len(node.args) != 2 or node.kwargs:  # a factor (alpha) is not part of the simple form
            continue
        replace(node, _SCALAR_FORMS[node.target], node.args)
        changed += 1
    return changed


_WITH_NUMBER: dict[Any, Any] = {
    aten.where.self: aten.where.ScalarOther,
    aten.masked_fill.Tensor: aten.masked_fill.Scalar,
    aten.eq.Tensor: aten.eq.Scalar,
}


def plain_numbers(graph: Graph) -> int:
    """A number that was made a tensor, to be filled in or compared with, becomes a literal."""
    changed = 0
    for node in calls(graph, set(_WITH_NUMBER)):
        number = _number(node.args[-1]) if not node.kwargs else None
        if number is None:
            continue
        target, args = _WITH_NUMBER[node.target], (*node.args[:-1], number)
        if isinstance(node.args[-2], Node) and fake_call(target, args).dtype == val(node).dtype:
            replace(node, target, args)
            changed += 1
    return changed


def _number(node: Any) -> bool | int | float | None:
    """The number that a tensor without dimensions is known to hold, as its dtype rounds it."""
    value = val(node) if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
        return None
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        number = node.args[-1]
        return torch.tensor(number, dtype=value.dtype).item() if isinstance(number, bool | int | float) else None
    constant = getattr(value, "constant", None)
    return constant.item() if constant is not None and constant.device.type != "meta" else None


def number_last(graph: Graph) -> int:
    """``2 * x`` and ``2 + x`` become ``x * 2`` and ``x + 2``."""
    changed = 0
    for node in calls(graph, {aten.add.Tensor, aten.mul.Tensor}):
        if node.kwargs or len(node.args) != 2:
            continue
        if not isinstance(node.args[0], Node) and isinstance(node.args[1], Node):
            node.args = (node.args[1], node.args[0])
            changed += 1
    return changed


def one_scaling(graph: Graph) -> int:
    """``x / 8`` becomes ``x * 0.125``: for powers of two both round the very same number."""
    changed = 0
    for node in calls(graph, {aten.div.Tensor}):
        if len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
            continue
        divisor = node.args[1]
        if isinstance(divisor, int | float) and _is_power_of_two(divisor) and val(node).dtype.is_floating_point:
            replace(node, aten.mul.Tensor, (node.args[0], 1.0 / divisor))
            changed += 1
    return changed


def _is_power_of_two(number: float) -> bool:
    """Whether a number other than 1 is a power of two, of a size that every dtype can hold with its inverse."""
    return number > 0 and number != 1 and math.frexp(number)[0] == 0.5 and 2**-14 <= number <= 2**14


def drop_identities(graph: Graph) -> int:
    """``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0`` are ``x`` where the dtype stays."""
    neutral: dict[Any, int] = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, set(neutral)):
        source, other = node.args[:2]
        if not isinstance(source, Node) or not is_tensor(val(source)) or not writes.may_stand_for(source, node):
            continue
        is_neutral = isinstance(other, int | float) and other == neutral[node.target]
        if is_neutral and val(source).dtype == val(node).dtype:
            take_over(node, source)
            changed += 1
    return changed


def one_square(graph: Graph) -> int:
    """``x ** 2`` and ``square(x)`` become ``x * x``."""
    changed = 0
    for node in calls(graph, {aten.pow.Tensor_Scalar, aten.square.default}):
        source = args_of(node)[0]
        is_square = node.target is aten.square.default or node.args[1] == 2
        if is_square and val(source).dtype == val(node).dtype:
            replace(node, aten.mul.Tensor, (source, source))
            changed += 1
    return changed


def one_rsqrt(graph: Graph) -> int:
    """``x ** -0.5`` and ``reciprocal(sqrt(x))`` become ``rsqrt(x)``; ``y / sqrt(x)`` stays: it rounds once.

    ``1 / sqrt(x)`` is traced as ``reciprocal(sqrt(x)) * 1``, whose product is dropped as an identity.
    """
    changed = 0
    for node in calls(graph, {aten.pow.Tensor_Scalar, aten.reciprocal.default}):
        source = _inverse_root_of(node)
        if source is not None:
            replace(node, aten.rsqrt.default, (source,))
            changed += 1
    return changed


def _inverse_root_of(node: Node) -> Node | None:
    first = node.args[0]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5 and isinstance(first, Node):
        return first
    root = first if node.target is aten.reciprocal.default else None
    if isinstance(root, Node) and root.target is aten.sqrt.default and isinstance(root.args[0], Node):
        return root.args[0]
    return None


def split_rsub(graph: Graph) -> int:
    """``rsub(x, y)`` becomes ``y - x`` for tensors."""
    changed = 0
    for node in calls(graph, {aten.rsub.Tensor}):
        if len(node.args) == 2 and not node.kwargs:
            replace(node, aten.sub.Tensor, (node.args[1], node.args[0]))
            changed += 1
    return changed


def one_addmm(graph: Graph) -> int:
    """``addmm``, ``mm`` and ``matmul`` with a 2-D weight become ``linear``, transposing the weight's view."""
    changed = 0
    for node in calls(graph, {aten.addmm.default, aten.mm.default, aten.matmul.default}):
        bias, x, weight = args_of(node) if node.target is aten.addmm.default else (None, *args_of(node))
        if node.kwargs or not isinstance(weight, Node) or not _is_weight(weight) or not is_tensor(val(x)):
            continue
        if (bias is not None and val(bias).dim() != 1) or val(x).dim() < 2:
            continue
        rows = insert(node, aten.transpose.int, (weight, -1, -2), fake_call(aten.transpose.int, (weight, -1, -2)))
        args = (x, rows) if bias is None else (x, rows, bias)
        replace(node, aten.linear.default, args)
        changed += 1
    return changed


def _is_weight(node: Node) -> bool:
    """A 2-D parameter, or the transposed view of one."""
    if node.target in (aten.t.default, aten.transpose.int) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op in ("placeholder", "get_attr") and is_tensor(val(node)) and val(node).dim() == 2


def explicit_scale(graph: Graph) -> int:
    """``scaled_dot_product_attention`` gets the scale that it would compute itself."""
    changed = 0
    for node in calls(graph, {aten.scaled_dot_product_attention.default}):
        width = val(args_of(node)[0]).shape[-1]
        if node.kwargs.get("scale") is None and isinstance(width, int):
            node.kwargs = {**node.kwargs, "scale": width**-0.5}
            changed += 1
    return changed


def shifted_arange(graph: Graph) -> int:
    """Whole numbers counted from zero, plus one, are counted from that one: positions behind a cache."""
    changed = 0
    for node in calls(graph, {aten.add.Tensor}):
        counted, number = (*node.args, None)[:2]
        if node.kwargs or type(number) is not int or not isinstance(counted, Node) or len(counted.users) != 1:
            continue
        if counted.target not in (aten.arange.default, aten.arange.start) or val(counted).dtype != torch.int64:
            continue
        start, end = (0, *counted.args)[-2:]
        if type(start) is not int or type(end) is not int:
            continue
        new = insert(counted, aten.arange.start, (start + number, end + number), val(node))
        new.kwargs = dict(counted.kwargs)
        take_over(node, new)
        changed += 1
    return changed


def scale_after_views(graph: Graph) -> int:
    """A number that queries are multiplied with before they are viewed multiplies the view, next to the attention."""
    changed = 0
    writes: Writes | None = None
    for node in calls(graph, {aten.scaled_dot_product_attention.default, aten.bmm.default}):
        chain = _views_above(args_of(node)[0])
        scaled = args_of(chain[-1])[0] if chain else None
        if scaled is None or not _is_scaled_alone(scaled):
            continue
        writes = writes or Writes(graph)
        if any(writes.touched(value) for value in (*chain, scaled, scaled.args[0])):
            continue
        value = scaled.args[0]
        for view in reversed(chain):
            args = (value, *view.args[1:])
            value = insert(view, view.target, args, fake_call(view.target, args))
        new = insert(node, aten.mul.Tensor, (value, scaled.args[1]), val(chain[0]), like=scaled)
        take_over(chain[0], new)
        changed += 1
    return changed


def _views_above(node: Any) -> list[Node]:
    """The views, each read by the next alone, that lead to a value; the last first."""
    chain = []
    while isinstance(node, Node) and node.target in (aten.reshape.default, aten.transpose.int) and len(node.users) == 1:
        chain.append(node)
        node = args_of(node)[0]
    return chain


def _is_scaled_alone(node: Node) -> bool:
    """Whether a value is another one of its dtype times a number, and has one reader."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1 or isinstance(node.args[1], Node):
        return False
    source = node.args[0]
    return isinstance(source, Node) and val(source).dtype == val(node).dtype
