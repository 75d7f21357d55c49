"""The lines of a function inside a kernel: some values of a plan, from loaded tiles and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .plan import Plan
from .space import SynthesisError, shape_of
from .words import COMPARISONS, HELPERS, LITERAL_ARGUMENTS, NATIVE, REDUCTIONS, WORDS, number

aten = torch.ops.aten
Segment = tuple[int, int] | None
_DTYPES = {
    torch.float32: "ct.float32", torch.float16: "ct.float16", torch.bfloat16: "ct.bfloat16",
    torch.int64: "ct.int64", torch.int32: "ct.int32", torch.bool: "ct.bool_",
}  # fmt: skip
#: Operation -> what its value is called, where its own name would be a word of Python or say little.
_CALLED = {
    "to": "cast",
    "abs": "size",
    "pow": "power",
    "where": "choice",
    "neg": "minus",
    "masked_fill": "filled",
}


class Lines:
    """Collects the lines for some values, and what the function has to be given.

    Args:
        plan: What to compute.
        load_name: Names the tile of an array's segment.
        reduction_name: Names what a reduction gives.
    """

    def __init__(
        self,
        plan: Plan,
        load_name: Callable[[Node, Segment], str],
        reduction_name: Callable[[Node], str],
    ) -> None:
        self.lines: list[str] = []
        self.loads: dict[tuple[Node, Segment], str] = {}
        self.reductions: dict[Node, str] = {}
        self.scalars: list[str] = []
        self.helpers: set[str] = set()
        self.takes_dtype = False
        self._plan, self._load_name, self._reduction_name = plan, load_name, reduction_name
        self._known: dict[tuple[Node, Segment], str] = {}
        self._counts: dict[str, int] = {}

    def value(self, node: Node, segment: Segment) -> str:
        """The name of a value's segment, after the lines that compute it."""
        if self._plan.space.kinds[node] != "row":
            segment = None
        key = node, segment
        if key not in self._known:
            self._known[key] = self._compute(node, segment)
        return self._known[key]

    def _compute(self, node: Node, segment: Segment) -> str:
        if node in self._plan.arrays:
            return self._loaded(node, segment)
        if node.target in REDUCTIONS:
            self.reductions[node] = self._reduction_name(node)
            return self._rounded(node, self.reductions[node])
        if node.target in (aten.reshape.default, aten.expand.default, aten.transpose.int):
            return self.value(node.args[0], segment)  # type: ignore[arg-type]
        if node.target is aten.slice.Tensor:
            return self._sliced(node, segment)
        if node.target is aten.cat.default:
            return self._joined(node, segment)
        return self._operation(node, segment)

    def _loaded(self, node: Node, segment: Segment) -> str:
        self.loads[node, segment] = self._load_name(node, segment)
        return self.loads[node, segment]

    def _sliced(self, node: Node, segment: Segment) -> str:
        start = int(node.args[2])  # type: ignore[arg-type]
        first, last = segment or (0, shape_of(node)[-1])
        source = node.args[0]
        return self.value(source, self._whole(source, (start + first, start + last)))  # type: ignore[arg-type]

    def _joined(self, node: Node, segment: Segment) -> str:
        first, last = segment or (0, shape_of(node)[-1])
        offset = 0
        for part in node.args[0]:  # type: ignore[union-attr]
            width = shape_of(part)[-1]  # type: ignore[arg-type]
            if offset <= first and last <= offset + width:
                return self.value(part, self._whole(part, (first - offset, last - offset)))  # type: ignore[arg-type]
            offset += width
        raise SynthesisError("a segment lies across a concatenation")

    def _whole(self, node: Node, segment: tuple[int, int]) -> Segment:
        return None if segment == (0, shape_of(node)[-1]) else segment

    def _operation(self, node: Node, segment: Segment) -> str:
        if node.target is aten.to.dtype:
            return self._cast(node, self.value(node.args[0], segment))  # type: ignore[arg-type]
        if self._is_native(node):
            one, two = (self.value(a, segment) for a in node.args)  # type: ignore[arg-type]
            return self._named(node, WORDS[node.target](one, two))
        kept = LITERAL_ARGUMENTS.get(node.target, ())
        operands = [a if i in kept else self._operand(node, a, segment) for i, a in enumerate(node.args)]
        options = {k: v if k in kept else self._operand(node, v, segment) for k, v in node.kwargs.items()}
        text = WORDS[node.target](*operands, **options)
        self.helpers |= {name for name in HELPERS if f"{name}(" in text}
        name = self._named(node, text)
        return self._rounded(node, name) if self._computes_wide(node) else name

    def _is_native(self, node: Node) -> bool:
        operands = [a for a in node.args if isinstance(a, Node)]
        dtype = node.meta["val"].dtype
        return (
            node.target in NATIVE
            and len(operands) == 2
            and not node.kwargs
            and all(self._dtype(a) == dtype and shape_of(a) for a in operands)
            and (dtype in (torch.float32, torch.bfloat16) or not dtype.is_floating_point)
        )

    def _computes_wide(self, node: Node) -> bool:
        return bool(node.meta["val"].dtype.is_floating_point) and node.meta["val"].dtype != torch.float32

    def _operand(self, node: Node, argument: Any, segment: Segment) -> str:
        if not isinstance(argument, Node):
            if isinstance(argument, float) and argument in self._plan.scalars:
                name = self._plan.scalars[argument]
                if name not in self.scalars:
                    self.scalars.append(name)
                return name
            return number(argument)
        name = self.value(argument, segment)
        if self._dtype(argument) in (torch.float32, torch.bool):
            return name
        floats = node.meta["val"].dtype.is_floating_point or any(
            isinstance(a, float) or (isinstance(a, Node) and self._dtype(a).is_floating_point) for a in node.args
        )
        if node.target in COMPARISONS and (not floats or self._beside_a_number(node)):
            return name  # a number is rounded to the dtype that it is compared in
        return f"wide({name})" if floats else name

    def _beside_a_number(self, node: Node) -> bool:
        return not all(isinstance(a, Node) for a in node.args)

    def _dtype(self, node: Node) -> torch.dtype:
        dtype: torch.dtype = node.meta["val"].dtype
        return dtype

    def _cast(self, node: Node, source: str) -> str:
        wanted = self._dtype(node)
        if wanted == self._dtype(node.args[0]):  # type: ignore[arg-type]
            return source
        if wanted == torch.float32:
            return self._named(node, f"wide({source})")
        return self._named(node, f"ct.astype({source}, {self._dtype_text(node)})")

    def _rounded(self, node: Node, name: str) -> str:
        if self._dtype(node) == torch.float32 or not self._dtype(node).is_floating_point:
            return name
        return self._named(node, f"ct.astype({name}, {self._dtype_text(node)})", "rounded")

    def _dtype_text(self, node: Node) -> str:
        if node in self._plan.follows:
            self.takes_dtype = True
            return "dtype"
        text = _DTYPES.get(self._dtype(node))
        if text is None:
            raise SynthesisError(f"no kernel can be written for {self._dtype(node)}")
        return text

    def _named(self, node: Node, text: str, stem: str | None = None) -> str:
        own = str(node.target).split(".")[1].strip("_")
        stem = stem or _CALLED.get(own, own)
        count = self._counts[stem] = self._counts.get(stem, 0) + 1
        name = f"{stem}_{count}"
        self.lines.append(f"{name} = {text}")
        return name
