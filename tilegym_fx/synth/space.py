"""Which dimensions the values of a region share, and how its arrays are viewed so that their tiles line up.

Every value has a *kind*: ``row`` (its last dimension is walked in tiles), ``one`` (one number for each row,
the last dimension is 1) or ``none`` (one number for each row, and no last dimension at all). The dimensions
before are *axes*; a dimension of size 1 is no axis, it is broadcast. Axes that every array has together, or
not at all, are one *group*: arrays are viewed as [group, ..., columns].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Graph, Node

from tilegym_fx.errors import KernelError

from .words import REDUCTIONS, WORDS

aten = torch.ops.aten
Kind = Literal["row", "one", "none"]
_MAX_GROUPS = 3


class SynthesisError(KernelError):
    """No kernel can be written for this by itself."""

    advice = "Write the kernel by hand: docs/kernel_loop.md says how"


def shape_of(node: Node) -> tuple[int, ...]:
    """The value's sizes at the probe."""
    return tuple(int(s) for s in node.meta["val"].shape)


@dataclass
class Space:
    """The dimensions of a region.

    Attributes:
        kinds: Value -> its kind.
        axes: Value -> for each leading dimension the axis, or None where its size is 1.
        order: The axes that are iterated over, outermost first.
        groups: The same, in runs that every array has together.
    """

    kinds: dict[Node, Kind] = field(default_factory=dict)
    axes: dict[Node, tuple[int | None, ...]] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def has_group(self, node: Node, group: Sequence[int]) -> bool:
        """Whether a value changes along a group."""
        return group[0] in self.axes[node]


def space_of(graph: Graph, inputs: Sequence[Node], outputs: Sequence[Node]) -> Space:
    """The space of a region.

    Args:
        graph: In normal form.
        inputs: The values that are loaded: placeholders, or views of them that the host makes.
        outputs: The values that are stored.

    Raises:
        SynthesisError: Its values do not line up.
    """
    builder = _Builder()
    for node in graph.nodes:
        if node in inputs:
            builder.place(node)
        elif node.op == "call_function":
            builder.follow(node)
    return builder.finish(inputs, outputs)


class _Builder:
    def __init__(self) -> None:
        self._kinds: dict[Node, Kind] = {}
        self._dims: dict[Node, tuple[int | None, ...]] = {}
        self._parents: list[int] = []

    def place(self, node: Node) -> None:
        shape = shape_of(node)
        self._kinds[node] = "one" if not shape or shape[-1] == 1 else "row"
        self._fresh(node)

    def follow(self, node: Node) -> None:
        """Kind and dimensions of what a call gives."""
        sources = [n for n in node.all_input_nodes if n in self._kinds]
        if node.target in WORDS:
            self._pointwise(node, sources)
        elif node.target in REDUCTIONS:
            self._reduce(node, sources[0])
        elif node.target is aten.reshape.default:
            self._reshape(node, sources[0])
        elif node.target is aten.expand.default:
            self._kinds[node] = self._kinds[sources[0]]
            self._fresh(node)
            self._align(node, sources[0])
        elif node.target is aten.transpose.int:
            self._transpose(node, sources[0])
        elif node.target is aten.slice.Tensor:
            self._slice(node, sources[0])
        elif node.target is aten.cat.default:
            self._cat(node, sources)
        else:
            raise SynthesisError(f"no kernel can be written for {node.target}")

    def _pointwise(self, node: Node, sources: Sequence[Node]) -> None:
        kinds = {self._kinds[s] for s in sources if shape_of(s)}
        if not sources:
            raise SynthesisError(f"{node.target} reads no tensor")
        if "none" in kinds and len(kinds) > 1:
            raise SynthesisError(f"{node.target} mixes rows with values that have lost their last dimension")
        self._kinds[node] = "row" if "row" in kinds else "none" if "none" in kinds else "one"
        self._fresh(node)
        for source in sources:
            self._align(node, source)

    def _reduce(self, node: Node, source: Node) -> None:
        if self._kinds[source] != "row":
            raise SynthesisError(f"{node.target} over a dimension that is no row")
        keeps = len(shape_of(node)) == len(shape_of(source))
        self._kinds[node] = "one" if keeps else "none"
        self._dims[node] = self._dims[source]

    def _reshape(self, node: Node, source: Node) -> None:
        before, after, kind = shape_of(source), shape_of(node), self._kinds[source]
        if kind == "row" and before[-1] == (after[-1] if after else None):
            self._kinds[node] = "row"
        elif kind in ("one", "none") and after and after[-1] == 1:
            self._kinds[node] = "one"
        elif kind in ("one", "none"):
            self._kinds[node] = "none"
        else:
            raise SynthesisError(f"a reshape of {list(before)} to {list(after)} inside it changes the rows")
        kept = [d for d in self._dims[source] if d is not None]
        sizes = [n for n in self._leading(node) if n != 1]
        if sizes != [n for n in self._leading(source) if n != 1]:
            raise SynthesisError(f"a reshape of {list(before)} to {list(after)} inside it merges dimensions")
        remaining = iter(kept)
        self._dims[node] = tuple(None if n == 1 else next(remaining) for n in self._leading(node))

    def _transpose(self, node: Node, source: Node) -> None:
        one, two = (int(d) for d in node.args[1:3])  # type: ignore[arg-type]
        kind, rank = self._kinds[source], len(shape_of(source))
        if kind != "none" and -1 in (one, two):
            raise SynthesisError("a transpose inside it turns rows into columns")
        self._kinds[node] = kind
        dims = list(self._dims[source])
        first, second = one % rank, two % rank
        dims[first], dims[second] = dims[second], dims[first]
        self._dims[node] = tuple(dims)

    def _slice(self, node: Node, source: Node) -> None:
        if node.args[1] != -1 or len(node.args) > 4 or self._kinds[source] == "none":
            raise SynthesisError("a slice inside it is not of columns")
        if shape_of(node)[-1] == 1:
            raise SynthesisError("a slice inside it takes one column of a computed value")
        self._kinds[node] = self._kinds[source]
        self._dims[node] = self._dims[source]

    def _cat(self, node: Node, sources: Sequence[Node]) -> None:
        dim = node.args[1] if len(node.args) > 1 else 0
        if dim != -1 or any(self._kinds[s] != "row" for s in sources):
            raise SynthesisError("a concatenation inside it is not of columns")
        self._kinds[node] = "row"
        self._fresh(node)
        for source in sources:
            self._align(node, source)

    def _leading(self, node: Node) -> tuple[int, ...]:
        shape = shape_of(node)
        return shape if self._kinds[node] == "none" else shape[:-1]

    def _fresh(self, node: Node) -> None:
        dims: list[int | None] = []
        for size in self._leading(node):
            if size == 1:
                dims.append(None)
            else:
                dims.append(len(self._parents))
                self._parents.append(len(self._parents))
        self._dims[node] = tuple(dims)

    def _align(self, node: Node, source: Node) -> None:
        """Dimensions that meet in an operation, counted from the last, are one axis."""
        for one, two in zip(reversed(self._dims[node]), reversed(self._dims[source]), strict=False):
            if one is not None and two is not None:
                self._parents[self._root(one)] = self._root(two)

    def _root(self, axis: int) -> int:
        while self._parents[axis] != axis:
            axis = self._parents[axis]
        return axis

    def finish(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> Space:
        axes = {node: tuple(None if d is None else self._root(d) for d in dims) for node, dims in self._dims.items()}
        order = tuple(a for a in axes[outputs[0]] if a is not None)
        for node in outputs:
            if tuple(a for a in axes[node] if a is not None) != order:
                raise SynthesisError("its outputs are not over the same dimensions")
        for node in inputs:
            mine = [a for a in axes[node] if a is not None]
            if mine != [a for a in order if a in mine]:
                raise SynthesisError("an input has more dimensions than the outputs, or another order")
        if len(set(order)) != len(order):
            raise SynthesisError("two dimensions of an output are one and the same")
        groups = _groups(order, [axes[n] for n in (*inputs, *outputs)])
        if len(groups) > _MAX_GROUPS:
            raise SynthesisError(f"its inputs are broadcast in {len(groups)} different ways")
        return Space(self._kinds, axes, order, groups)


def _groups(order: Sequence[int], arrays: Iterable[tuple[int | None, ...]]) -> tuple[tuple[int, ...], ...]:
    """Runs of axes that each array has together or lacks together; one empty run where there is no axis."""
    arrays = list(arrays)
    groups: list[list[int]] = []
    for axis in order:
        if groups and all((axis in array) == (groups[-1][-1] in array) for array in arrays):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return tuple(tuple(g) for g in groups)
