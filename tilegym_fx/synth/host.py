"""The function that launches a kernel: views of the arrays, the results, and which tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from tilegym_fx.schema import Definition

from .kernel import KernelText, Piece
from .plan import Plan
from .space import SynthesisError, shape_of


class HostWriter:
    """Writes the entry point of a plan's kernel."""

    def __init__(self, plan: Plan, kernel: KernelText, definition: Definition, name: str) -> None:
        self._plan, self._kernel, self._definition, self._name = plan, kernel, definition, name
        self._space = plan.space
        self._full = self._full_array()

    def write(self) -> str:
        """The source of the entry point."""
        lines = [
            self._signature(),
            f'    """{self._docstring()}"""',
            *self._sizes(),
            *self._results(),
            f"    if {self._first_result()}.numel():",
            *self._launch(),
            f"    return {', '.join(self._definition.outputs)}",
        ]
        return "\n".join(lines)

    def _signature(self) -> str:
        parameters = ", ".join(
            f"{key}: {'torch.Tensor' if spec.shape is not None else 'float'}"
            for key, spec in self._definition.inputs.items()
        )
        count = len(self._definition.outputs)
        result = "torch.Tensor" if count == 1 else f"tuple[{', '.join(['torch.Tensor'] * count)}]"
        return f"def {self._name}({parameters}) -> {result}:"

    def _docstring(self) -> str:
        rows = [
            f"        {key}: [{', '.join(spec.shape)}] in {spec.dtype}, any strides."
            if spec.shape is not None
            else f"        {key}: a number."
            for key, spec in self._definition.inputs.items()
        ]
        first = (self._definition.description or self._name).split(". ")[0].rstrip(".")
        any_shape = "\n\n    Any leading dimensions will do." if self.is_rank_free() else ""
        return f"{first[:100]}.{any_shape}\n\n    Args:\n" + "\n".join(rows) + "\n    "

    def _full_array(self) -> Node | None:
        """An input that has every dimension of the results and whole rows."""
        for node in self._plan.arrays:
            dims = self._space.axes[node]
            if self._space.kinds[node] == "row" and tuple(dims) == self._space.order:
                return node
        return None

    def is_rank_free(self) -> bool:
        """Whether leading dimensions can be any: every array has them all, in order, or none."""
        if self._full is None or len(self._space.groups) != 1:
            return False
        values = (*self._plan.arrays, *self._plan.outputs.values())
        if any(n.op != "placeholder" for n in self._plan.arrays):
            return False
        return all(tuple(self._space.axes[n]) in (self._space.order, ()) for n in values)

    def _is_flat(self) -> bool:
        """Whether all arrays are one long row: pointwise, and nothing is broadcast or cut."""
        if self._plan.reductions or not self.is_rank_free():
            return False
        values = [*self._plan.arrays, *self._plan.outputs.values()]
        same = {shape_of(n)[-1:] for n in values}
        return len(same) == 1 and all(
            self._space.kinds[n] == "row" and tuple(self._space.axes[n]) == self._space.order for n in values
        ) and all(p.segment is None for p in (*self._kernel.loads, *self._kernel.stores))  # fmt: skip

    def _text(self, node: Node) -> str:
        return self._plan.arrays[node]

    def _width(self) -> str:
        """Text of the width of a segment."""
        pieces = [p for p in self._kernel.loads if self._space.kinds[p.node] == "row"]
        if not pieces:
            return str(self._plan.unit)
        for piece in pieces:
            if piece.segment is None:
                return f"{self._text(piece.node)}.shape[-1]"
        return str(self._plan.unit)

    def _axis(self, axis: int) -> str:
        """Text of the size of an axis."""
        for node, text in self._plan.arrays.items():
            dims = self._space.axes[node]
            if axis in dims:
                back = dims.index(axis) - len(shape_of(node))
                return f"{text}.shape[{back}]"
        node = next(n for n in self._plan.outputs.values() if axis in self._space.axes[n])
        return str(shape_of(node)[self._space.axes[node].index(axis)])

    def _group_names(self) -> tuple[str, ...]:
        return {0: ("rows",), 1: ("rows",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}[
            len(self._space.groups)
        ]

    def _sizes(self) -> Iterator[str]:
        if self._is_flat():
            assert self._full is not None
            yield f"    rows, width = as_rows({self._text(self._full)})"
            return
        yield f"    width = {self._width()}"
        if self.is_rank_free():
            assert self._full is not None
            full = self._text(self._full)
            yield f"    rows = {full}.numel() // {full}.shape[-1] if {full}.numel() else 0"
            return
        for name, group in zip(self._group_names(), self._space.groups or ((),), strict=True):
            yield f"    {name} = {' * '.join(map(self._axis, group)) or '1'}"

    def _results(self) -> Iterator[str]:
        device = next(t for n, t in self._plan.arrays.items())
        for name, node in self._plan.outputs.items():
            made = f"{self._shape(node)}, dtype={self._dtype(node)}, device={device}.device"
            yield f"    {name} = torch.empty({made})"

    def _shape(self, node: Node) -> str:
        if self.is_rank_free():
            assert self._full is not None
            full, kind = self._text(self._full), self._space.kinds[node]
            if kind == "none":
                return f"{full}.shape[:-1]"
            if kind == "row" and shape_of(node)[-1] == shape_of(self._full)[-1]:
                return f"{full}.shape"
            return f"(*{full}.shape[:-1], {self._last(node)})"
        if not shape_of(node):
            return "()"
        dims = self._space.axes[node]
        sizes = ["1" if d is None else self._axis(d) for d in dims]
        if self._space.kinds[node] != "none":
            sizes.append(self._last(node))
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def _last(self, node: Node) -> str:
        size = shape_of(node)[-1] if shape_of(node) else 1
        if size == 1:
            return "1"
        for other, text in self._plan.arrays.items():
            if shape_of(other)[-1:] == (size,):
                return f"{text}.shape[-1]"
        return _times(size // self._plan.unit)

    def _dtype(self, node: Node) -> str:
        if node in self._plan.follows:
            source = next(n for n in self._plan.arrays if n in self._plan.follows)
            return f"{self._text(source)}.dtype"
        return str(node.meta["val"].dtype)

    def _first_result(self) -> str:
        return next(iter(self._definition.outputs))

    def _view(self, piece: Piece, text: str) -> str:
        """The array as the kernel sees it."""
        if piece.segment is not None:
            text = f"{text}{self._columns_of(piece.segment)}"
        if self._is_flat():
            return f"{text}.reshape(rows, width)"
        return f"{text}.reshape({', '.join([*self._leading(piece.node), self._columns(piece.node)])})"

    def _columns_of(self, segment: tuple[int, int]) -> str:
        """Which columns, in widths of a segment."""
        first, last = (bound // self._plan.unit for bound in segment)
        return f"[..., {_times(first)} : {_times(last)}]" if first else f"[..., :{_times(last)}]"

    def _leading(self, node: Node) -> list[str]:
        """Texts of an array's sizes along the groups, 1 where it does not change."""
        dims, groups = self._space.axes[node], self._space.groups or ((),)
        pairs = zip(self._group_names(), groups, strict=True)
        return [name if group and group[0] in dims else "1" for name, group in pairs]

    def _columns(self, node: Node) -> str:
        if self._space.kinds[node] == "row":
            return "width"
        return "1" if not shape_of(node) or self._space.kinds[node] == "none" else self._last(node)

    def _launch(self) -> Iterator[str]:
        inner = self._group_names()[-1]
        outer = "".join(f"{n} * " for n in self._group_names()[:-1])
        if self._plan.reductions:
            held = len([p for p in self._kernel.loads if self._space.kinds[p.node] == "row"])
            yield f"        rows_per_block, *tile = pick_tiles({inner}, {outer}{inner}, width, {held})"
            grid = f"{outer}-(-{inner} // rows_per_block)"
            constants = "rows_per_block, *tile"
        else:
            yield f"        rows_per_block, chunk, fit = pick_tiles({inner}, width)"
            grid = f"{outer}-(-{inner} // rows_per_block) * -(-width // chunk)"
            constants = "rows_per_block, chunk, fit"
        yield "        arrays = ("
        yield from (f"            {self._view(p, self._text(p.node))}," for p in self._kernel.loads)
        yield from (f"            {self._stored(p)}," for p in self._kernel.stores)
        yield "        )"
        numbers = [*self._kernel.scalars, *([self._inverse()] if self._kernel.has_mean else [])]
        passed = ", ".join(["*arrays", *numbers, constants])
        yield f"        launch({self._name}_kernel, ({grid},), ({passed}))"

    def _inverse(self) -> str:
        """Text of one divided by how many numbers a mean is of."""
        sources = [r.all_input_nodes[0] for r in self._plan.reductions if r.target is torch.ops.aten.mean.dim]
        counts = {len(self._plan.segments(source)) for source in sources}
        if len(counts) > 1:
            raise SynthesisError("it takes means of rows of different widths")
        count = counts.pop()
        return f"1.0 / ({count} * width)" if count > 1 else "1.0 / width"

    def _stored(self, piece: Piece) -> str:
        """Results are contiguous, so a view is always possible, and a copy would lose what is written."""
        name = next(k for k, n in self._plan.outputs.items() if n is piece.node)
        if piece.segment is None:
            return self._view(piece, name).replace(".reshape(", ".view(")
        width = f"{len(self._plan.segments(piece.node))} * width"
        columns = self._columns_of(piece.segment)
        return f"{name}.view({', '.join([*self._leading(piece.node), width])}){columns}"


def _times(count: int) -> str:
    return "width" if count == 1 else f"{count} * width" if count else "0"
