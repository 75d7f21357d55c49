"""A function as the calls of ATen that it makes: what ``make_fx`` records, in a fraction of its time.

There are no proxies, which take most of the time of a trace. So a sketch knows static sizes only, and gives up where a
value comes from no call, or where gradients or autocast are switched; then there is ``make_fx``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode, ProxyTorchDispatchMode
from torch.fx.node import map_aggregate

from .normalize.edit import MODE_SWITCHES

#: What a mode is told of autocast, which has been switched by then.
_TOLD = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}


class _NoSketchError(Exception):
    """Internal: something that is no call of ATen on values of recorded ones."""


class _Recorder(ProxyTorchDispatchMode):
    """Puts every call into a graph; torch shows calls before their decomposition to modes of this class alone."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__(None, "real", pre_dispatch=True)  # type: ignore[arg-type]
        self.graph = Graph()
        self._nodes: dict[int, Node] = {}
        self._made: dict[int, Node] = {}
        self._kept: list[Any] = []  # an id is a value's own only while that lives
        for name, value in inputs.items():
            self._note(self.graph.placeholder(name), value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisablePythonDispatcher():  # its rules are for symbolic sizes
            result = func(*args, **(kwargs or {}))
        self._note(self.graph.call_function(func, self.node_of(args), self.node_of(kwargs or {})), result)
        return result

    def _note(self, node: Node, value: Any) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node
        if isinstance(value, torch.Tensor):
            self._made.setdefault(_memory_of(value), node)
        self._kept.append(value)
        for i, part in enumerate(value if isinstance(value, tuple | list) else ()):
            self._note(self.graph.call_function(operator.getitem, (node, i)), part)

    def node_of(self, value: Any) -> Any:
        """A value with nodes for tensors."""
        return map_aggregate(value, self._node_of)

    def _node_of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        made = self._made.get(_memory_of(value))  # what a factory makes comes as another object
        if made is None or made.meta["val"].shape != value.shape:
            raise _NoSketchError
        return made


class _Switches(PreDispatchTorchFunctionMode):
    """Notes whether gradients or autocast are switched: of autocast, torch tells modes of this class alone."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= func in MODE_SWITCHES
        return None if func in _TOLD else func(*args, **(kwargs or {}))


def sketch(function: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Graph, dict[str, Node]] | None:
    """The graph of a function, and the placeholder of each tensor input; None where only a trace tells.

    Args:
        function: Plain PyTorch.
        inputs: By name: fake or meta tensors, each another object, and numbers.
    """
    if any(map(_is_symbolic, inputs.values())):
        return None
    switches = _Switches()
    recorder = _Recorder({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
    try:
        with _mode_of(inputs), enable_python_dispatcher(), recorder, switches:
            result = function(**inputs)
        recorder.graph.output(recorder.node_of(result))
    except _NoSketchError:
        return None
    if switches.seen:
        return None
    return recorder.graph, {str(node.target): node for node in recorder.graph.find_nodes(op="placeholder")}


def _memory_of(value: torch.Tensor) -> int:
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # under vmap
        raise _NoSketchError from None


def _mode_of(inputs: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """What fake tensors want around their calls."""
    return next((value.fake_mode for value in inputs.values() if isinstance(value, FakeTensor)), nullcontext())


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt | torch.SymFloat)
