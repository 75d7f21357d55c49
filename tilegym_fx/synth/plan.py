"""A reference as what its kernel does: which arrays it loads, what it reduces, what it stores.

Columns. Where a slice or a concatenation cuts rows, everything is cut at all these places: rows become
*segments* of one width, each an array of its own, and all segments are walked together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from tilegym_fx.errors import InventoryError
from tilegym_fx.inventory.code import reference_function
from tilegym_fx.normalize.edit import fake_call, insert
from tilegym_fx.pattern import trace
from tilegym_fx.schema import Definition

from .space import Space, SynthesisError, shape_of, space_of
from .words import COMPOSITES, REDUCTIONS, can_write

__all__ = ["Plan", "SynthesisError", "plan_of"]

aten = torch.ops.aten
_MAX_SEGMENTS = 8
#: Sizes of variable axes at the probe; primes, so that no two mean the same and none is a constant's.
_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
_HALVES = (torch.bfloat16, torch.float16)
#: What layer_norm's weight, bias and eps are where they are not given.
_LAYER_NORM_DEFAULTS: tuple[Any, ...] = (None, None, 1e-5)


@dataclass(frozen=True)
class Plan:
    """What a kernel has to do.

    Attributes:
        graph: The reference in normal form, composites taken apart.
        arrays: What is loaded, an input or a view of one -> the text with which the host makes it.
        scalars: Value of a number input at the probe -> its name.
        outputs: Output -> the value.
        space: The dimensions.
        unit: Width of a segment at the probe; the row's own where nothing cuts it.
        follows: Values whose dtype follows the 16-bit inputs' dtype.
        reductions: In the order in which they can be done.
    """

    graph: Graph
    arrays: Mapping[Node, str]
    scalars: Mapping[float, str]
    outputs: Mapping[str, Node]
    space: Space
    unit: int
    follows: frozenset[Node]
    reductions: tuple[Node, ...]

    def segments(self, node: Node) -> tuple[tuple[int, int] | None, ...]:
        """The parts of a value's columns; None for all of them."""
        if self.space.kinds[node] != "row":
            return (None,)
        width = shape_of(node)[-1]
        if width == self.unit:
            return (None,)
        return tuple((i, i + self.unit) for i in range(0, width, self.unit))


def plan_of(definition: Definition) -> Plan:
    """The plan for a Definition.

    Raises:
        SynthesisError: A kernel for it cannot be written by itself; the message has the operation.
    """
    graph, inputs, outputs = _traced(definition, torch.bfloat16)
    half = _follows(definition, graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not can_write(node):
            raise SynthesisError(f"no kernel can be written for {node.target} ({node.name})")
    arrays = _arrays(graph, inputs)
    taken_apart = {new: node for node in list(graph.nodes) for new in _take_apart(node)}
    follows = frozenset(half | {new for new, old in taken_apart.items() if new.meta["val"].dtype in _HALVES})
    values = tuple(_result(graph))
    space = space_of(graph, tuple(arrays), values)
    reductions = tuple(n for n in graph.nodes if n.target in REDUCTIONS)
    unit = _unit(graph, space, values, reductions)
    scalars = {value: name for name, value in _numbers(definition).items()}
    return Plan(graph, arrays, scalars, dict(zip(outputs, values, strict=True)), space, unit, follows, reductions)


def _result(graph: Graph) -> Iterator[Node]:
    result: Any = next(iter(reversed(graph.nodes))).args[0]
    yield from result if isinstance(result, list | tuple) else (result,)


def _numbers(definition: Definition) -> dict[str, float]:
    """A value for every number input, such as no reference has as a literal."""
    numbers = {}
    for position, (name, spec) in enumerate(definition.inputs.items()):
        if spec.shape is None:
            if "float" not in spec.dtype:
                raise SynthesisError(f"{definition.name} takes the {spec.dtype} {name!r}")
            numbers[name] = 0.18750731 + 0.00130277 * position
    return numbers


def _arrays(graph: Graph, inputs: Mapping[str, Node]) -> dict[Node, str]:
    """Inputs, and views of them that only the host needs to make, with the text that makes them."""
    texts = {node: name for name, node in inputs.items()}
    for node in graph.nodes:
        if node.op == "call_function" and node.args and node.args[0] in texts:
            view = _host_view(node)
            if view is not None:
                texts[node] = texts[node.args[0]] + view
    return {n: t for n, t in texts.items() if any(u not in texts for u in n.users)}


def _host_view(node: Node) -> str | None:
    if node.target is aten.transpose.int:
        return f".transpose({node.args[1]}, {node.args[2]})"
    if node.target is not aten.reshape.default:
        return None
    before, after = list(shape_of(node.args[0])), list(shape_of(node))  # type: ignore[arg-type]
    for longer, shorter, call in ((after, before, "unsqueeze"), (before, after, "squeeze")):
        if len(longer) == len(shorter) + 1:
            for dim in range(len(longer) - 1, -1, -1):
                if longer[dim] == 1 and longer[:dim] + longer[dim + 1 :] == shorter:
                    return f".{call}({dim - len(longer)})"
    return None


def _traced(definition: Definition, half: torch.dtype) -> tuple[Graph, dict[str, Node], list[str]]:
    run = _run_of(definition)
    constants = {a.value for a in definition.axes.values() if a.type == "const"}
    primes = iter(p for p in _PRIMES if p not in constants)
    sizes = {n: a.value if a.type == "const" else next(primes) for n, a in definition.axes.items()}
    if definition.constraints:
        raise SynthesisError(f"{definition.name} has constraints between its axes")
    values: dict[str, Any] = _numbers(definition)
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            continue
        dtype = half if spec.dtype in ("bfloat16", "float16") else getattr(torch, spec.dtype)
        values[name] = torch.empty([sizes[a] for a in spec.shape or ()], dtype=dtype, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {
            k: mode.from_tensor(values[k]) if isinstance(values[k], torch.Tensor) else values[k]
            for k in definition.inputs
        }
    try:
        graph, inputs, outputs = trace(run, fakes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SynthesisError(f"the reference of {definition.name} cannot be traced: {error}") from error
    if any(not isinstance(o, Node) or o.op != "call_function" for o in outputs):
        raise SynthesisError(f"{definition.name} returns what it was given")
    return graph, inputs, list(definition.outputs)


def _run_of(definition: Definition) -> Any:
    try:
        return reference_function(definition.name, definition.reference)
    except InventoryError as error:
        raise SynthesisError(error.what, advice=error.next_step) from error


def _follows(definition: Definition, graph: Graph) -> set[Node]:
    """Values of 16 bits whose dtype changes with the inputs': those that are another one at another probe."""
    if not any(spec.dtype in ("bfloat16", "float16") for spec in definition.inputs.values()):
        return set()
    other, _, _ = _traced(definition, torch.float16)
    if [n.target for n in other.nodes if n.op == "call_function"] != [
        n.target for n in graph.nodes if n.op == "call_function"
    ]:
        return set()
    pairs = [
        (a, b) for a, b in zip(graph.nodes, other.nodes, strict=True) if isinstance(a.meta.get("val"), torch.Tensor)
    ]
    return {a for a, b in pairs if a.meta["val"].dtype != b.meta["val"].dtype}


def _take_apart(node: Node) -> Iterator[Node]:
    """Write a composite as several operations, in place; gives the new calls."""
    if node.op != "call_function" or node.target not in COMPOSITES:
        return
    parts = _Parts(node)
    if node.target is aten.layer_norm.default:
        result = parts.layer_norm()
    else:
        result = parts.softmax(log=node.target is aten.log_softmax.int)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    yield from parts.made


class _Parts:
    """Inserts calls before a composite."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any) -> Node:
        new = insert(self._node, target, args, fake_call(target, args))
        self.made.append(new)
        return new

    def _wide(self, node: Any) -> Any:
        if node.meta["val"].dtype == torch.float32:
            return node
        return self.call(aten.to.dtype, node, torch.float32)

    def _as_before(self, node: Node) -> Node:
        dtype = self._node.meta["val"].dtype
        return node if dtype == torch.float32 else self.call(aten.to.dtype, node, dtype)

    def softmax(self, *, log: bool) -> Node:
        wide = self._wide(self._node.args[0])
        top = self.call(aten.amax.default, wide, [-1], True)
        lowered = self.call(aten.sub.Tensor, wide, top)
        grown = self.call(aten.exp.default, lowered)
        total = self.call(aten.sum.dim_IntList, grown, [-1], True)
        if log:
            return self._as_before(self.call(aten.sub.Tensor, lowered, self.call(aten.log.default, total)))
        return self._as_before(self.call(aten.div.Tensor, grown, total))

    def layer_norm(self) -> Node:
        given = self._node.args
        weight, bias, eps = (*given[2:], *_LAYER_NORM_DEFAULTS[len(given) - 2 :])[:3]
        wide = self._wide(given[0])
        mean = self.call(aten.mean.dim, wide, [-1], True)
        distance = self.call(aten.sub.Tensor, wide, mean)
        spread = self.call(aten.mean.dim, self.call(aten.mul.Tensor, distance, distance), [-1], True)
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, spread, eps))
        result = self.call(aten.mul.Tensor, distance, scale)
        if isinstance(weight, Node):
            result = self.call(aten.mul.Tensor, result, self._wide(weight))
        if isinstance(bias, Node):
            result = self.call(aten.add.Tensor, result, self._wide(bias))
        return self._as_before(result)


def _unit(graph: Graph, space: Space, outputs: Sequence[Node], reductions: Sequence[Node]) -> int:
    """The width that divides all rows and all places where rows are cut."""
    cuts: dict[Node, set[int]] = {}
    for node in graph.nodes:
        if node in space.kinds:
            cuts[node] = _cuts(node, cuts, space)
    roots = [n for n in outputs if space.kinds[n] == "row"] + [r.all_input_nodes[0] for r in reductions]
    if not roots:
        return 1
    unit = math.gcd(*(number for root in roots for number in (shape_of(root)[-1], *cuts[root])))
    most = max(shape_of(root)[-1] for root in roots) // unit
    if most > _MAX_SEGMENTS:
        raise SynthesisError(f"its rows are cut into {most} pieces")
    return unit


def _cuts(node: Node, cuts: Mapping[Node, set[int]], space: Space) -> set[int]:
    sources = [s for s in node.all_input_nodes if space.kinds.get(s) == "row" and s in cuts]
    if space.kinds[node] != "row":
        return set()
    width = shape_of(node)[-1]
    if node.target is aten.slice.Tensor:
        start = int(node.args[2])  # type: ignore[arg-type]
        return {c - start for c in cuts[sources[0]] if 0 < c - start < width}
    if node.target is aten.cat.default:
        found: set[int] = set()
        offset = 0
        for part in node.args[0]:  # type: ignore[union-attr]
            found |= {offset, *(offset + c for c in cuts[part])}  # type: ignore[index]
            offset += shape_of(part)[-1]  # type: ignore[arg-type]
        return found - {0}
    return {c for s in sources for c in cuts[s]}
