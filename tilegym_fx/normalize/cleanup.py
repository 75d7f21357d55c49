"""Passes that drop what does no arithmetic: asserts, copies, dropout in eval, duplicates, dead code."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .aliasing import Writes, written_args
from .edit import aten, calls, size_key, switches_mode, take_over, val
from .gradients import differentiable

_ASSERTS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
}
_COPIES = {
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.detach.default,
}
_PADS = {aten.pad.default, aten.constant_pad_nd.default}
_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
_RANDOM = {"dropout", "rand", "randn", "randint", "bernoulli", "multinomial", "normal", "uniform", "rrelu"}


def drop_asserts(graph: Graph) -> int:
    """Remove ``_assert_tensor_metadata`` and friends: they add users to values and compute nothing."""
    found = [n for n in calls(graph, _ASSERTS) if not n.users]
    for node in found:
        graph.erase_node(node)
    return len(found)


def default_args(graph: Graph) -> int:
    """Write every call's arguments by position in schema order, without trailing defaults."""
    changed = 0
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or written_args(node):
            continue
        args = _positional(node, schema)
        if args is not None and (args != node.args or node.kwargs):
            kept = {k: v for k, v in node.kwargs.items() if k in _keyword_only(schema) and v is not None}
            changed += args != node.args or kept != node.kwargs
            node.args, node.kwargs = args, kept
    return changed


def _keyword_only(schema: torch._C.FunctionSchema) -> dict[str, Any]:
    return {a.name: a.default_value for a in schema.arguments if a.kwarg_only}


def _positional(node: Node, schema: torch._C.FunctionSchema) -> tuple[Any, ...] | None:
    arguments = [a for a in schema.arguments if not a.kwarg_only]
    values = list(node.args)
    for argument in arguments[len(values) :]:
        if argument.name in node.kwargs:
            values.append(node.kwargs[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            return None
    while values and arguments[len(values) - 1].has_default_value() and _same(values[-1], arguments[len(values) - 1]):
        values.pop()
    return tuple(values)


def _same(value: Any, argument: torch._C.Argument) -> bool:
    default = argument.default_value
    return not isinstance(value, Node) and type(value) is type(default) and value == default


def sizes_of_first(graph: Graph) -> int:
    """A symbolic size is read from the first value that has it, so that it adds no reader to later ones."""
    sizes = list(calls(graph, {aten.sym_size.int}))
    if not sizes:
        return 0
    first = _first_with_size(graph)
    changed = 0
    for node in sizes:
        home = first.get(size_key(val(node)))
        if isinstance(home, Node):
            take_over(node, home)
            changed += 1
        elif home is not None and node.args != home:
            node.args = home
            changed += 1
    return changed


def _first_with_size(graph: Graph) -> dict[Any, Node | tuple[Node, int]]:
    """Symbolic size -> the input that is it, or the first tensor that has it and which dimension it is."""
    first: dict[Any, Node | tuple[Node, int]] = {}
    for node in graph.nodes:
        value = val(node)
        if isinstance(value, torch.SymInt) and node.op == "placeholder":
            first[size_key(value)] = node
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if not isinstance(cast(Any, size), int):
                    first.setdefault(size_key(size), (node, dim - value.dim()))
    return first


def drop_copies(graph: Graph) -> int:
    """Remove copies and aliases of values that nobody writes: they change strides at most.

    A copy that is itself an output stays: the caller may write it. ``detach`` stays where it can cut a gradient.
    """
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, _COPIES):
        source = node.args[0]
        if not isinstance(source, Node) or not _may_go(node, source, writes):
            continue
        if node.target is aten.detach.default and differentiable(val(source)):
            continue
        take_over(node, source)
        changed += 1
    return changed


def _may_go(node: Node, source: Node, writes: Writes) -> bool:
    if node.meta.get("pinned"):
        return False
    if node.target is aten.alias.default:
        return not writes.touched(node)
    return writes.may_stand_for(source, node)


def plain_pads(graph: Graph) -> int:
    """Padding with 0 needs no value, and padding by nothing is a copy."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, _PADS):
        source, sizes, *how = node.args
        if isinstance(source, Node) and isinstance(sizes, list | tuple) and not any(map(_is_more, sizes)):
            if _may_go(node, source, writes):
                take_over(node, source)
                changed += 1
        elif how in (["constant", 0], [0]) or (node.target is aten.constant_pad_nd.default and not how):
            node.target, node.args = aten.pad.default, (source, sizes)
            changed += 1
    return changed


def _is_more(size: Any) -> bool:
    return not isinstance(size, int) or size != 0


def drop_dropout(graph: Graph) -> int:
    """Remove dropout with p = 0 or outside training."""
    changed = 0
    for node in calls(graph, _DROPOUTS):
        source, p, train = (*node.args, *node.kwargs.values())[:3]
        if isinstance(source, Node) and (p == 0 or train is False):
            take_over(node, source)
            changed += 1
    return changed


def merge_duplicates(graph: Graph) -> int:
    """Common subexpressions become one node, but not across a write or a change of grad or autocast mode."""
    writes = Writes(graph)
    seen: dict[Any, Node] = {}
    changed = section = 0
    for node in list(graph.nodes):
        section += switches_mode(node)
        key = _value_key(node, writes)
        if key is None:
            continue
        key = (section, key)
        first = seen.setdefault(key, node)
        if first is not node and writes.may_stand_for(first, node):
            take_over(node, first)
            changed += 1
    return changed


def _value_key(node: Node, writes: Writes) -> Any:
    if node.op != "call_function" or not is_pure(node) or writes.touched(node):
        return None
    epochs = tuple(writes.epoch(a, node) for a in node.all_input_nodes) if writes else ()
    return (node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))), epochs)


def is_pure(node: Node) -> bool:
    """Whether a call gives the same value each time and does nothing else."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = schema.name.split("::")[-1]
    return torch.Tag.nondeterministic_seeded not in node.target.tags and name not in _RANDOM


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, Node):
        return value
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return (type(value).__name__, size_key(value))


def drop_dead(graph: Graph) -> int:
    """Remove pure calls that nobody reads."""
    before = len(graph.nodes)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and is_pure(node):
            graph.erase_node(node)
    return before - len(graph.nodes)
