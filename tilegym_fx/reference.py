"""Calls of a normal graph as readable PyTorch: a function ``run`` of the values that come from outside.

Sizes that change from call to call are read from the inputs' shapes, and a 16-bit dtype from an input that
has it, so that the function means the same at other sizes and dtypes.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_INFIX: dict[Any, str] = {
    aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/",
    aten.add.Scalar: "+", aten.sub.Scalar: "-", aten.mul.Scalar: "*", aten.div.Scalar: "/",
    aten.lt.Tensor: "<", aten.le.Tensor: "<=", aten.gt.Tensor: ">", aten.ge.Tensor: ">=",
    aten.lt.Scalar: "<", aten.le.Scalar: "<=", aten.gt.Scalar: ">", aten.ge.Scalar: ">=",
    aten.eq.Tensor: "==", aten.ne.Tensor: "!=", aten.eq.Scalar: "==", aten.ne.Scalar: "!=",
    aten.bitwise_and.Tensor: "&", aten.bitwise_or.Tensor: "|", aten.__and__.Tensor: "&", aten.__or__.Tensor: "|",
}  # fmt: skip
#: Functions of torch that are called like the operation, with its arguments in order.
_PLAIN = {
    "abs", "amax", "amin", "bmm", "clamp", "cos", "erf", "exp", "log", "logical_and", "logical_not",
    "logical_or", "matmul", "maximum", "minimum", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "sin",
    "sqrt", "tanh", "where",
}  # fmt: skip


def text_of(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node], free: Collection[int] = ()) -> str:
    """The calls as the text of a module with a function ``run``.

    Args:
        nodes: In graph order.
        inputs: Become ``x0``, ``x1`` and so on.
        outputs: What it returns.
        free: Sizes that are read from the inputs' shapes.
    """
    writer = _Writer(inputs, free)
    lines = [writer.line(node) for node in nodes]
    returned = ", ".join(writer.names[n] for n in outputs)
    signature = f"def run({', '.join(writer.names[n] for n in inputs)}):"
    return "\n".join(["import torch", "", "", signature, *lines, f"    return {returned}"]) + "\n"


class _Writer:
    """Names values, and writes one line for each call."""

    def __init__(self, inputs: Sequence[Node], free: Collection[int]) -> None:
        self.names = {node: f"x{i}" for i, node in enumerate(inputs)}
        self._inputs = tuple(inputs)
        self._free = frozenset(free)
        self._counts: dict[str, int] = {}

    def line(self, node: Node) -> str:
        expression = self._expression(node)
        self.names[node] = self._fresh(_stem(node))
        return f"    {self.names[node]} = {expression}"

    def _fresh(self, stem: str) -> str:
        count = self._counts.get(stem, 0)
        self._counts[stem] = count + 1
        return f"{stem}_{count}" if count else stem

    def _expression(self, node: Node) -> str:
        special = _SPECIAL.get(node.target)
        written = special(self, node) if special is not None else None
        if written is not None:
            return written
        sign = _INFIX.get(node.target)
        if sign is not None and len(node.args) == 2 and not node.kwargs:
            return f"{self.text(node.args[0])} {sign} {self.text(node.args[1])}"
        arguments = [self.text(a) for a in node.args]
        arguments += [f"{k}={self.text(v)}" for k, v in node.kwargs.items()]
        plain = _stem(node)
        where = f"torch.{plain}" if plain in _PLAIN else f"torch.ops.{node.target}"
        return f"{where}({', '.join(arguments)})"

    def text(self, value: Any) -> str:
        """An argument."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, torch.device):
            return f"{self.names[self._inputs[0]]}.device" if self._inputs else "'cpu'"
        if isinstance(value, torch.dtype):
            return self.dtype(value)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f"float('{value}')"
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.text(v) for v in value)}]"
        return repr(value)

    def dtype(self, value: torch.dtype) -> str:
        """A dtype; one of 16 bits as that of an input that has it."""
        like = next((n for n in self._inputs if n.meta["val"].dtype == value), None)
        return f"{self.names[like]}.dtype" if value in _HALVES and like is not None else str(value)

    def sizes(self, values: Sequence[Any]) -> str:
        """Sizes; a free one as that of an input that has it."""
        return ", ".join(self._size(v) for v in values)

    def _size(self, value: Any) -> str:
        if isinstance(value, int) and value in self._free:
            for node in self._inputs:
                shape = list(node.meta["val"].shape)
                if value in shape:
                    return f"{self.names[node]}.shape[{shape.index(value)}]"
        return self.text(value)


def _stem(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    stem = str(packet if packet is not None else node.target).rpartition(".")[2].strip("_") or "value"
    return f"{stem}_value" if keyword.iskeyword(stem) else stem


def _reshape(writer: _Writer, node: Node) -> str:
    source = writer.text(node.args[0])
    before, after = list(node.args[0].meta["val"].shape), list(node.meta["val"].shape)  # type: ignore[union-attr]
    if len(after) == len(before) + 1:
        for dim in range(len(after)):
            if after[dim] == 1 and after[:dim] + after[dim + 1 :] == before:
                return f"{source}.unsqueeze({dim - len(after)})"
    if len(before) == len(after) + 1:
        for dim in range(len(before)):
            if before[dim] == 1 and before[:dim] + before[dim + 1 :] == after:
                return f"{source}.squeeze({dim - len(before)})"
    return f"{source}.reshape({writer.sizes(node.args[1])})"  # type: ignore[arg-type]


def _slice(writer: _Writer, node: Node) -> str | None:
    _, dim, start, end, *step = node.args
    if step or not isinstance(dim, int) or dim >= 0 or not (isinstance(start, int) and isinstance(end, int)):
        return None
    rest = "".join(", :" for _ in range(-dim - 1))
    return f"{writer.text(node.args[0])}[..., {start}:{end}{rest}]"


def _along(writer: _Writer, node: Node) -> str:
    """A reduction as a method."""
    source, dims, *rest = node.args
    dims = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    keep = ", keepdim=True" if rest and rest[0] else ""
    dtype = rest[1] if len(rest) > 1 else node.kwargs.get("dtype")
    cast = f", dtype={writer.text(dtype)}" if dtype is not None else ""
    return f"{writer.text(source)}.{_stem(node)}({writer.text(dims)}{keep}{cast})"


def _softmax(writer: _Writer, node: Node) -> str:
    source, dim, *rest = node.args
    cast = f", dtype={writer.text(rest[0])}" if rest and rest[0] is not None else ""
    return f"torch.{_stem(node)}({writer.text(source)}, dim={dim}{cast})"


def _method(name: str, most: int = 2, *, sizes: bool = False) -> Callable[[_Writer, Node], str | None]:
    def write(writer: _Writer, node: Node) -> str | None:
        if node.kwargs or (not sizes and len(node.args) > most):
            return None
        rest = writer.sizes(node.args[1]) if sizes else ", ".join(writer.text(a) for a in node.args[1:])  # type: ignore[arg-type]
        return f"{writer.text(node.args[0])}.{name}({rest})"

    return write


def _functional(name: str) -> Callable[[_Writer, Node], str | None]:
    def write(writer: _Writer, node: Node) -> str:
        arguments = [writer.text(a) for a in node.args]
        arguments += [f"{k}={writer.text(v)}" for k, v in node.kwargs.items()]
        return f"torch.nn.functional.{name}({', '.join(arguments)})"

    return write


_SPECIAL: dict[Any, Callable[[_Writer, Node], str | None]] = {
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.mean.dim: _along,
    aten.sum.dim_IntList: _along,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
    aten.to.dtype: _method("to"),
    aten.transpose.int: _method("transpose", 3),
    aten.expand.default: _method("expand", sizes=True),
    aten.masked_fill.Scalar: _method("masked_fill", 3),
    aten.neg.default: lambda writer, node: f"-{writer.text(node.args[0])}",
    aten.cat.default: lambda writer, node: (
        f"torch.cat({writer.text(node.args[0])}, dim={node.args[1] if len(node.args) > 1 else 0})"
    ),
    aten.silu.default: _functional("silu"),
    aten.gelu.default: _functional("gelu"),
    aten.softplus.default: _functional("softplus"),
}
