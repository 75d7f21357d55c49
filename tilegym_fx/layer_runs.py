"""What each layer of a model does while the model runs: layers that look alike may still do different things.

A layer's place is known in many ways that its attributes do not tell of: a table on a configuration, a property, a
global, an argument, what its caller does with it. So the model is run twice, with its first layers and with all, and
nothing computed: each layer must do in the second run, operation by operation, what the one that stands for it did in
the first, and the code around the layers must do the same in both.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .layers import Copies

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device, torch.memory_format)


@dataclass
class Runs:
    """What was done.

    Attributes:
        of_layer: Path of a layer -> its operations, in all its runs.
        around: The operations outside of layers, but for views, and how often each was done.
    """

    of_layer: Mapping[str, list[Hashable]] = field(default_factory=lambda: defaultdict(list))
    around: Counter[Hashable] = field(default_factory=Counter)


def unlike(copies: Copies, first: Runs, whole: Runs) -> str:
    """Why the first layers of each list do not stand for all of them; empty where they do.

    Args:
        copies: Which layers stand for which.
        first: What was done with the first layers alone.
        whole: What was done with all.
    """
    standing = {other: path for path, others in copies.of_layer.items() for other in others}
    for path in (path for short in copies.lists for path in short.layers):
        other = standing.get(path, path)
        if whole.of_layer.get(path) != first.of_layer.get(other) or (path != other and path in first.of_layer):
            than = f"than {other}" if path != other else "where only the first layers are there"
            return f"{path} does something else {than}"
    return "" if first.around == whole.around else "the code around the layers does something else for fewer of them"


@contextmanager
def watching(copies: Copies) -> Iterator[Runs]:
    """Notes what the layers of a model do while the body runs it."""
    recorder = _Recorder(copies)
    here = threading.get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == here:
            recorder.enter(module)

    def leave(module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == here:
            recorder.leave(module)

    with (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        recorder,
    ):
        yield recorder.runs


@dataclass
class _Inside:
    """One run of a layer: its tensors, by the order in which they came."""

    path: str
    names: dict[int, Hashable]
    kept: list[torch.Tensor] = field(default_factory=list)

    def name(self, tensor: torch.Tensor) -> Hashable:
        """The name of a parameter, or the number of another tensor; one that is new is described too."""
        if (known := self.names.get(id(tensor))) is not None:
            return known
        self.kept.append(tensor)  # or its identity might be that of a later one
        self.names[id(tensor)] = len(self.kept)
        return len(self.kept), _kind(tensor)


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self.runs = Runs()
        self._paths = {id(layer): path for short in copies.lists for path, layer in short.layers.items()}
        self._paths[id(copies.model)] = ""
        self._inside: list[_Inside] = []

    def enter(self, module: nn.Module) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            held = (*module.named_parameters(), *module.named_buffers())
            self._inside.append(_Inside(path, {id(tensor): name for name, tensor in held}))

    def leave(self, module: nn.Module) -> None:
        if self._inside and self._paths.get(id(module)) == self._inside[-1].path:
            self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            self._note(str(func), (args, kwargs), getattr(func, "is_view", False))
        return func(*args, **(kwargs or {}))

    def _note(self, what: str, operands: Any, is_view: bool = False) -> None:
        inside = self._inside[-1]
        name = inside.name if inside.path else _kind
        done = (what, *(_described(leaf, name) for leaf in tree_leaves(operands)))
        if inside.path:
            self.runs.of_layer[inside.path].append(done)
        elif not is_view:  # an index into what is there for each layer goes with the layer's place
            self.runs.around[done] += 1


def _described(leaf: Any, name: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return name(leaf)
    return type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else ""


def _kind(tensor: torch.Tensor) -> Hashable:
    strides: Sequence[Any] = tensor.stride() if tensor.layout is torch.strided else ()
    return str(tuple(tensor.shape)), tensor.dtype, tensor.device, str(tuple(strides))
