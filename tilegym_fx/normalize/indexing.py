"""Passes that bring writes through an index of one number, ``rolled[:, :, torch.tensor([-1])] = new``, to one form."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from .aliasing import Writes
from .edit import args_of, aten, calls, insert, shape_key, take_over, val
from .gradients import differentiable
from .views import RESHAPES

_INDEX_DTYPES = (torch.int64, torch.int32)
_TO_THE_END = 2**62
_MOVES = {aten.to.device, aten.to.dtype_layout, aten._to_copy.default}


def drop_detach_in_place(graph: Graph) -> int:
    """``torch.tensor`` detaches what it made, in place: of a value that has no gradient that does nothing."""
    changed = 0
    for node in calls(graph, {aten.detach_.default}):
        source = node.args[0]
        is_made = isinstance(source, Node) and source.target is aten.lift_fresh_copy.default
        if isinstance(source, Node) and is_made and not differentiable(val(source)):
            take_over(node, source)
            changed += 1
    return changed


def plain_indices(graph: Graph) -> int:
    """``torch.tensor([-1])``, a constant that the graph holds, becomes ``full([1], -1)``, which tells its number."""
    found = list(calls(graph, {aten.lift_fresh_copy.default, *_MOVES}))
    writes = Writes(graph) if found else None
    changed = 0
    for node in found:
        source = node.args[0]
        number = _moved(source, node) if node.target in _MOVES else _held(source)
        if writes is None or number is None or writes.touched(node):
            continue
        new = insert(node, aten.full.default, ([1], number), val(node))
        new.kwargs = {"dtype": val(node).dtype, "device": val(node).device, "pin_memory": False}
        take_over(node, new)
        changed += 1
    return changed


def _moved(source: Any, node: Node) -> int | None:
    """The number in such a ``full`` that is moved to another device."""
    if not isinstance(source, Node) or source.target is not aten.full.default or source.args[0] != [1]:
        return None
    number, before, now = source.args[1], val(source), val(node)
    if not isinstance(number, int) or now.dtype not in _INDEX_DTYPES or now.shape != (1,):
        return None
    return number if now.dtype == before.dtype else None


def _held(source: Any) -> int | None:
    """The number in a constant of the graph that is a list of one index."""
    if not isinstance(source, Node) or source.op != "get_attr":
        return None
    held: Any = source.graph.owning_module
    for name in str(source.target).split("."):
        held = getattr(held, name, None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor | torch.nn.Parameter) or held.is_meta:
        return None
    if held.dtype not in _INDEX_DTYPES or tuple(held.shape) != (1,):
        return None
    with _disable_current_modes():
        return int(held.item())


def puts_into_all(graph: Graph) -> int:
    """What is put into a view of all of a value is put into that: setting an item views what has symbolic sizes."""
    found = list(calls(graph, {aten.index_put_.default}))
    position = {node: i for i, node in enumerate(graph.nodes)} if found else {}
    changed = 0
    for node in found:
        view = node.args[0]
        if not isinstance(view, Node) or node.users or len(view.users) > 1 or not _is_all(view):
            continue
        value = view.args[0]
        assert isinstance(value, Node)
        node.args = (value, *node.args[1:])
        graph.erase_node(view)
        for reader in [user for user in value.users if position[user] > position[node]]:
            reader.replace_input_with(value, node)
        changed += 1
    return changed


def _is_all(view: Node) -> bool:
    if view.target is not aten.slice.Tensor:
        return False
    _, _, start, end, step = (*args_of(view), *(None, 0, None, None, 1)[len(view.args) :])[:5]
    is_to_the_end = end is None or (isinstance(end, int) and end >= _TO_THE_END)
    return start in (None, 0) and step == 1 and is_to_the_end


def whole_puts(graph: Graph) -> int:
    """What is put along one dimension keeps leading dimensions of one, which setting an item drops from it."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, {aten.index_put.default}):
        target, indices, new, *rest = node.args
        if not isinstance(target, Node) or not isinstance(new, Node) or new.target not in RESHAPES:
            continue
        if not _is_along_one_dimension(indices):
            continue
        source = new.args[0]
        if writes.touched(new) or not isinstance(source, Node) or val(source).dim() > val(target).dim():
            continue
        extra = val(source).dim() - val(new).dim()
        shape = shape_key(val(source).shape)
        if extra > 0 and (1,) * extra + shape_key(val(new).shape) == shape:
            node.args = (target, indices, source, *rest)
            changed += 1
    return changed


def _is_along_one_dimension(indices: Any) -> bool:
    """Whether an index gives as many dimensions as the value has: what is put there may have as many, too."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and val(given[0]).dtype in _INDEX_DTYPES and val(given[0]).dim() == 1
