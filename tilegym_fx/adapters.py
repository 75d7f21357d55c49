"""A small function between a region and a kernel that nearly fits it: order, broadcast, layout, dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_fx.kernel_source import cut_out
from tilegym_fx.schema import Definition

_Tensors = dict[str, Any]


@dataclass(frozen=True)
class Adapter:
    """How to compute a region by another Definition.

    Attributes:
        order: Tensor input of the Definition -> input of the region.
        scalars: Number input of the Definition -> its value.
        broadcast: Whether tensors are expanded to one shape first.
        flatten: Inputs of the region that lose leading dimensions of size 1.
        dim: The dimension, counted from the end, that is moved to the last place and back; -1 for none.
        cast: Dtype that tensors are cast to; results are cast back.
    """

    order: Mapping[str, str]
    scalars: Mapping[str, float] = field(default_factory=dict)
    broadcast: bool = False
    flatten: tuple[str, ...] = ()
    dim: int = -1
    cast: str = ""

    def apply(self, function: Callable[..., Any], definition: Definition, inputs: _Tensors) -> Any:
        """What a function that takes the Definition's inputs gives for the region's inputs."""
        tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        wide = max((t.dim() for t in tensors.values()), default=0)
        dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
        if self.broadcast:
            shape = torch.broadcast_shapes(*(tensors[k].shape for k in self._expanded(definition)))
            tensors |= {k: tensors[k].expand(shape) for k in self._expanded(definition)}
        tensors |= {k: tensors[k].flatten() for k in self.flatten}
        if self.dim != -1:
            tensors = {k: v.transpose(self.dim, -1) if v.dim() == wide else v for k, v in tensors.items()}
        if self.cast:
            wanted = getattr(torch, self.cast)
            tensors = {k: v.to(wanted) if v.is_floating_point() else v for k, v in tensors.items()}
        arguments = [
            self.scalars[name] if name in self.scalars else tensors[self.order[name]] for name in definition.inputs
        ]
        results = function(*arguments)
        single = not isinstance(results, tuple)
        results = [self._back(r, wide, dtype) for r in ((results,) if single else results)]
        return results[0] if single else tuple(results)

    def _back(self, result: torch.Tensor, wide: int, dtype: torch.dtype) -> torch.Tensor:
        if self.cast:
            result = result.to(dtype)
        if self.dim != -1 and result.dim() == wide:
            result = result.transpose(self.dim, -1)
        return result.contiguous()

    def _expanded(self, definition: Definition) -> list[str]:
        """Inputs of the region that have one declared shape in the Definition."""
        shapes = [definition.inputs[k].shape for k in self.order]
        common = max(shapes, key=lambda s: (shapes.count(s), len(s or ())))
        return [v for k, v in self.order.items() if definition.inputs[k].shape == common]

    def text(self, name: str, base: str, region: Definition, definition: Definition) -> str:
        """The adapter as a function of the region's inputs that calls ``base``."""
        ranks = {k: len(s.shape) for k, s in region.inputs.items() if s.shape is not None}
        wide = max(ranks.values())
        now = {k: k for k in ranks}
        lines = []
        if self.broadcast:
            expanded = self._expanded(definition)
            shapes = ", ".join(f"{k}.shape" for k in expanded)
            lines.append(f"shape = torch.broadcast_shapes({shapes})")
            now |= {k: f"{now[k]}.expand(shape)" for k in expanded}
        now |= {k: f"{now[k]}.flatten()" for k in self.flatten}
        if self.dim != -1:
            now |= {k: f"{now[k]}.transpose({self.dim}, -1)" for k in now if ranks[k] == wide}
        if self.cast:
            floats = [k for k in now if "float" in region.inputs[k].dtype]
            now |= {k: f"{now[k]}.to(torch.{self.cast})" for k in floats}
        given = [str(self.scalars[n]) if n in self.scalars else now[self.order[n]] for n in definition.inputs]
        return "\n".join(
            [*self._head(name, region), *(f"    {line}" for line in lines), *self._tail(base, given, region)]
        )

    def _head(self, name: str, region: Definition) -> list[str]:
        parameters = ", ".join(f"{k}: torch.Tensor" for k in region.inputs)
        count = len(region.outputs)
        result = "torch.Tensor" if count == 1 else f"tuple[{', '.join(['torch.Tensor'] * count)}]"
        return [f"def {name}({parameters}) -> {result}:", f'    """{self.sentence()}"""']

    def _tail(self, base: str, given: list[str], region: Definition) -> list[str]:
        ranks = [len(s.shape or ()) for s in region.outputs.values()]
        wide = max(len(s.shape) for s in region.inputs.values() if s.shape is not None)
        first = next(k for k, s in region.inputs.items() if "float" in s.dtype)
        call = f"{base}({', '.join(given)})"
        if not self.cast and self.dim == -1:
            return [f"    return {call}"]
        names = list(region.outputs)
        lines = [f"    {', '.join(names)} = {call}"]
        backs = []
        for name, rank in zip(names, ranks, strict=True):
            back = f"{name}.to({first}.dtype)" if self.cast else name
            moved = self.dim != -1 and rank == wide
            backs.append(f"{back}.transpose({self.dim}, -1).contiguous()" if moved else back)
        return [*lines, f"    return {', '.join(backs)}"]

    def sentence(self) -> str:
        """What it does, for a person."""
        done = []
        if self.broadcast:
            done.append("expands its inputs to one shape")
        if self.flatten:
            done.append("drops dimensions of size 1")
        if self.dim != -1:
            done.append(f"moves dimension {self.dim} to the last place and back")
        if self.cast:
            done.append(f"computes in {self.cast}")
        return f"Calls another kernel; {' and '.join(done) or 'changes the order of arguments'}."


def adapter_file(
    adapter: Adapter, name: str, region: Definition, definition: Definition, source: str, entry: str
) -> str:
    """A kernel file: the other Definition's kernel, cut out of its own file, and the adapter.

    Args:
        adapter: What to do.
        name: Of the entry point.
        region: What it computes.
        definition: By what.
        source: Text of the file with the kernel of ``definition``.
        entry: Its function there.
    """
    docstring = f"{name} in cuTile, by the kernel of {definition.name}."
    base = f"as_{definition.name}"
    kernel = cut_out(source, entry, base, docstring)
    return f"{kernel}\n\n{adapter.text(name, base, region, definition)}\n"
