"""Where every node of an exported graph comes from in the model's source, and which local holds which value.

`torch.export.export(strict=False)` runs the model's own Python. While it runs, a trace function follows the
frames of model code; the graph's `create_node` is watched at the same time. Together they give, for each
node, the chain of calls and the exact instruction (so the exact expression) that created it, and, for each
call, the value of every local before each executed line. One `Call` is one run of a function: the forward of
32 layers gives 32 of them.

Nodes are known by a number planted in `node.meta`, which survives the renaming that export does afterwards.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._export import non_strict_utils

from tilegym_fx.results import Frame, Site

if TYPE_CHECKING:
    from tilegym_fx.export import ExportedGraph

#: The key under which a node carries its number.
NODE_KEY = "tilegym_fx_id"

_TORCH = str(Path(torch.__file__).parent) + "/"
_TORCH_MODULES = _TORCH + "nn/modules/"
_TORCH_MODULE_MACHINERY = {_TORCH_MODULES + "module.py", _TORCH_MODULES + "container.py"}
_OWN = str(Path(__file__).parent) + "/"
_STDLIB = tuple(
    str(Path(sysconfig.get_paths()[key])) + "/" for key in ("stdlib", "platstdlib") if key in sysconfig.get_paths()
)
_INSTALLED = "/site-packages/"
#: What torch runs while it exports, and how configurations are read; never model code.
_LIBRARIES = (
    "sympy/", "mpmath/", "networkx/", "numpy/", "jinja2/", "filelock/", "fsspec/", "typing_extensions.py",
    "transformers/configuration_utils.py", "transformers/integrations/heterogeneity/",
    "transformers/exporters/", "_distutils_hack/",
)  # fmt: skip
_MAX_ITEMS = 64
_GENERATOR_FLAGS = 0x20 | 0x80 | 0x100 | 0x200


class _Opaque:
    """The value of a local that is neither a graph value nor something that can be compared."""

    def __repr__(self) -> str:
        return "<opaque>"


OPAQUE = _Opaque()


@dataclass(frozen=True)
class NodeRef:
    """A value of the graph, by the number that its node carries in `meta`."""

    id: int


@dataclass
class Step:
    """The state of a call before a line runs.

    Attributes:
        line: The line about to run; 0 for the state at the return.
        order: How many nodes the graph had.
        changes: Locals that differ from the step before, by name.
        gone: Locals that the step before had and this one has not.
    """

    line: int
    order: int
    changes: dict[str, Any]
    gone: tuple[str, ...] = ()


@dataclass
class Call:
    """One run of one function of model code.

    Attributes:
        index: Its place in the order in which calls began.
        parent: The call of model code that it happened in, with `parent_offset` the instruction there.
        code: The function's code object.
        globals: The function's global names.
        module: The `nn.Module` that is its first argument, if it has one.
        receiver: Class of the object whose method it is, if that is no module.
        attributes: The graph values that this object held when the call began, by name.
        steps: One per executed line, and one for the return.
        returned: What it returned.
        order: How many nodes the graph had when it began; `order_end` when it ended.
    """

    index: int
    parent: Call | None
    parent_offset: int
    code: CodeType
    globals: dict[str, Any]
    module: nn.Module | None
    order: int
    order_end: int = 0
    steps: list[Step] = field(default_factory=list)
    returned: Any = OPAQUE
    receiver: type | None = None
    attributes: Mapping[str, NodeRef] = field(default_factory=dict)
    children: list[Call] = field(default_factory=list)

    @property
    def is_generator(self) -> bool:
        return bool(self.code.co_flags & _GENERATOR_FLAGS)

    def env(self, step: int) -> dict[str, Any]:
        """The locals before the step with this number ran."""
        env: dict[str, Any] = {}
        for past in self.steps[: step + 1]:
            env.update(past.changes)
            for name in past.gone:
                env.pop(name, None)
        return env

    def ancestors(self) -> Iterator[Call]:
        """This call and those that it happened in, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class Origin:
    """The call and the instruction in it that created a node."""

    call: Call
    offset: int


@dataclass
class Provenance:
    """What was recorded during one export.

    Attributes:
        module: The exported module.
        graph: The exported graph; its nodes are the ones that `origin` and `value` speak of.
        calls: Every call of model code, in the order in which they began.
        held: Name of a graph input -> dotted path of the parameter or buffer that it is.
    """

    module: nn.Module
    graph: fx.Graph
    calls: list[Call]
    _origins: dict[int, Origin]
    _replaced: dict[int, int]
    held: Mapping[str, str] = field(default_factory=dict)
    _nodes: dict[int, fx.Node] = field(default_factory=dict)
    _names: dict[str, fx.Node] = field(default_factory=dict)
    _paths: dict[int, list[str]] = field(default_factory=dict)
    _tensors: dict[int, NodeRef] = field(default_factory=dict)
    _direct: dict[int, list[int]] = field(default_factory=dict)
    _real: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            self._names[node.name] = node
            if NODE_KEY in node.meta:
                self._nodes[node.meta[NODE_KEY]] = node
        for path, module in self.module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
            self._real[id(vars(module))] = module
        for call in self.calls:
            if call.module is not None:
                call.module = self.real(call.module)
        for name, path in self.held.items():
            owner, _, attribute = path.rpartition(".")
            tensor = getattr(self.module.get_submodule(owner), attribute)
            if name in self._names and NODE_KEY in self._names[name].meta:
                self._tensors[id(tensor)] = NodeRef(self._names[name].meta[NODE_KEY])
        for number, origin in self._origins.items():
            self._direct.setdefault(origin.call.index, []).append(number)

    def real(self, module: nn.Module) -> nn.Module:
        """The module itself: a model with shared modules is traced through stand-ins that have the same
        `__dict__`."""
        return self._real.get(id(vars(module)), module)

    def direct(self, call: Call) -> Sequence[int]:
        """The numbers of the nodes that a call created itself, not through calls of model code."""
        return self._direct.get(call.index, ())

    def tensor(self, tensor: torch.Tensor) -> NodeRef | None:
        """The graph input that a parameter or buffer of the module became."""
        return self._tensors.get(id(tensor))

    def node(self, name: str) -> fx.Node | None:
        """The exported node with this name."""
        return self._names.get(name)

    def resolve(self, ref: NodeRef) -> fx.Node | None:
        """The exported node that a recorded value stands for, None if export dropped it."""
        number = ref.id
        while number not in self._nodes and number in self._replaced:
            number = self._replaced[number]
        return self._nodes.get(number)

    def origin(self, node: fx.Node) -> Origin | None:
        """The call and instruction that created an exported node; None for inputs and parameters."""
        return self._origins.get(node.meta.get(NODE_KEY, -1))

    def module_paths(self, module: nn.Module) -> Sequence[str]:
        """Every dotted path at which the exported module holds this module."""
        return self._paths.get(id(module), ())

    def site(self, node: fx.Node) -> Site:
        """The module path, class and frames of an exported node."""
        origin = self.origin(node)
        if origin is None:
            return Site()
        frames: list[Frame] = []
        offset = origin.offset
        module: nn.Module | None = None
        for call in origin.call.ancestors():
            frames.append(Frame(call.code.co_filename, line_of(call.code, offset), _qualname(call.code)))
            module = module if module is not None else call.module
            offset = call.parent_offset
        paths = self.module_paths(module) if module is not None else ()
        return Site(
            paths[0] if paths else "",
            type(module).__name__ if module is not None else "",
            tuple(frames[::-1]),
        )

    def sites(self) -> Mapping[str, Site]:
        """The site of each node of the exported graph, by node name."""
        return {node.name: self.site(node) for node in self.graph.nodes}


def _qualname(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


def line_of(code: CodeType, offset: int) -> int:
    """The source line of the instruction at a byte offset of a code object."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return line


def is_model_code(code: CodeType) -> bool:
    """Whether a function counts as model code: not torch (except the forwards of torch.nn), not Python's
    own library."""
    file = code.co_filename
    if file.startswith(_TORCH_MODULES):
        return code.co_name == "forward" and file not in _TORCH_MODULE_MACHINERY
    if code.co_name == "<module>" or file.startswith(("<string>", "<frozen", "<eval_with_key", _TORCH, _OWN)):
        return False
    installed = file.partition(_INSTALLED)[2] or file.partition("/dist-packages/")[2]
    if installed:
        return not installed.startswith(_LIBRARIES)
    return not file.startswith(_STDLIB)


class Recorder:
    """Follows one export. Use through `recording()`."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._stack: list[tuple[FrameType, Call, dict[str, Any]]] = []
        self._origins: dict[int, Origin] = {}
        self._replaced: dict[int, int] = {}
        self._traced: dict[CodeType, bool] = {}
        self._count = 0
        self._thread = threading.get_ident()

    def finish(self, module: nn.Module, graph: fx.Graph, held: Mapping[str, str]) -> Provenance:
        """Ties what was recorded to the exported graph.

        Args:
            module: The module that was exported.
            graph: The exported graph, before normalisation. It is kept, so normalise a copy.
            held: Name of a graph input -> dotted path of the parameter or buffer that it is.
        """
        return Provenance(module, graph, self._calls, self._origins, self._replaced, dict(held))

    def created(self, node: fx.Node) -> None:
        """Notes that the graph under construction got a node."""
        if threading.get_ident() != self._thread:
            return
        node.meta[NODE_KEY] = self._count
        if self._stack:
            frame, call, _ = self._stack[-1]
            self._origins[self._count] = Origin(call, frame.f_lasti)
        self._count += 1

    def replaced(self, node: fx.Node, by: fx.Node) -> None:
        """Notes that one node took the place of another, as the empty first part of a cache is dropped."""
        if NODE_KEY in node.meta and NODE_KEY in by.meta and node.meta[NODE_KEY] != by.meta[NODE_KEY]:
            self._replaced[node.meta[NODE_KEY]] = by.meta[NODE_KEY]

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """The trace function for new frames: follows those of model code."""
        code = frame.f_code
        traced = self._traced.get(code)
        if traced is None:
            traced = self._traced[code] = is_model_code(code)
        if not traced or event != "call":
            return None
        self._enter(frame)
        return self._trace_lines

    def _enter(self, frame: FrameType) -> None:
        parent, offset = None, 0
        if self._stack:
            above, parent, _ = self._stack[-1]
            offset = above.f_lasti
        call = Call(len(self._calls), parent, offset, frame.f_code, frame.f_globals, _first_module(frame), self._count)
        self._note_receiver(call, frame)
        self._calls.append(call)
        if parent is not None:
            parent.children.append(call)
        self._stack.append((frame, call, {}))

    def _note_receiver(self, call: Call, frame: FrameType) -> None:
        if call.module is not None or not call.code.co_argcount or call.code.co_varnames[0] != "self":
            return
        held = frame.f_locals.get("self")
        call.receiver = type(held)
        tensors = {n: self._value(v) for n, v in getattr(held, "__dict__", {}).items() if isinstance(v, torch.Tensor)}
        call.attributes = {name: ref for name, ref in tensors.items() if isinstance(ref, NodeRef)}

    def _trace_lines(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self._step(frame, frame.f_lineno)
        elif event == "return":
            self._step(frame, 0)
            _, call, _ = self._stack.pop()
            call.returned = self._value(arg)
            call.order_end = self._count
        return self._trace_lines

    def _step(self, frame: FrameType, line: int) -> None:
        _, call, seen = self._stack[-1]
        changes: dict[str, Any] = {}
        now = frame.f_locals
        for name, held in now.items():
            if name in seen and seen[name] is held and not isinstance(held, (dict, list)):
                continue
            seen[name] = held
            changes[name] = self._value(held)
        gone = tuple(name for name in seen if name not in now) if len(seen) != len(now) else ()
        for name in gone:
            del seen[name]
        call.steps.append(Step(line, self._count, changes, gone))

    def _value(self, held: Any, depth: int = 0) -> Any:
        if isinstance(held, torch.Tensor):
            return _node_ref(held)
        if held is None or isinstance(
            held, (bool, int, float, str, nn.Module, type, torch.dtype, torch.device, FunctionType)
        ):
            return held
        if isinstance(held, (tuple, list)) and len(held) <= _MAX_ITEMS and depth < 3:
            return tuple(self._value(item, depth + 1) for item in held)
        if type(held) is dict and len(held) <= _MAX_ITEMS and depth < 1:
            return {key: self._value(item, depth + 1) for key, item in held.items() if isinstance(key, str)}
        return OPAQUE


def _first_module(frame: FrameType) -> nn.Module | None:
    code = frame.f_code
    if code.co_argcount == 0:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    return first if isinstance(first, nn.Module) else None


def _node_ref(tensor: torch.Tensor) -> Any:
    tracer = _active_tracer()
    if tracer is None:
        return OPAQUE
    slot = tracer.tensor_tracker.get(tensor)
    node = getattr(getattr(slot, "proxy", None), "node", None)
    number = node.meta.get(NODE_KEY) if node is not None else None
    return OPAQUE if number is None else NodeRef(number)


def _active_tracer() -> Any:
    key = torch._C._TorchDispatchModeKey.PROXY
    mode = torch._C._get_dispatch_mode(key) or torch._ops._get_dispatch_mode_pre_dispatch(key)
    tracer = getattr(mode, "tracer", None)
    return tracer if hasattr(tracer, "tensor_tracker") else None


@contextmanager
def recording(module: nn.Module) -> Iterator[Recorder]:
    """Records the calls of a module inside the block; call `finish` on what it gives after the export.

    Only while the module's own call runs is there a trace function: most of an export is torch's own work.

    Example:
        ```python
        with recording(model) as recorder:
            exported = export_module(model, args, kwargs)
        provenance = recorder.finish(model, exported.graph_module.graph, exported.parameters)
        ```
    """
    recorder = Recorder()
    before = sys.gettrace()
    hooks = (
        nn.Module.register_forward_pre_hook(module, lambda *_: sys.settrace(recorder.trace)),
        nn.Module.register_forward_hook(module, lambda *_: sys.settrace(before), always_call=True),
    )
    try:
        with _watched_nodes(recorder), _untraced_dispatch(), _no_collection():
            yield recorder
    finally:
        sys.settrace(before)
        for hook in hooks:
            hook.remove()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector from running: it calls finalisers of other libraries wherever the model's code
    happens to be, and they would be taken for calls of that code."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _watched_nodes(recorder: Recorder) -> Iterator[None]:
    original = fx.Graph.create_node

    def create_node(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(graph, *args, **kwargs)
        recorder.created(node)
        return node

    replace = fx.Node.replace_all_uses_with

    def replace_all_uses_with(node: fx.Node, by: fx.Node, *args: Any, **kwargs: Any) -> list[fx.Node]:
        recorder.replaced(node, by)
        return replace(node, by, *args, **kwargs)

    fx.Graph.create_node = create_node  # type: ignore[method-assign,assignment]
    fx.Node.replace_all_uses_with = replace_all_uses_with  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        fx.Graph.create_node = original  # type: ignore[method-assign]
        fx.Node.replace_all_uses_with = replace  # type: ignore[method-assign]


@contextmanager
def _untraced_dispatch() -> Iterator[None]:
    """Stops tracing while torch handles one operation: most calls of an export, and none of model code."""
    handler = getattr(non_strict_utils, "_NonStrictTorchFunctionHandler", None)
    if handler is None:
        yield
        return
    original = handler.__torch_function__

    def handle(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return original(self, func, types, args, kwargs)
        finally:
            sys.settrace(trace)

    handler.__torch_function__ = handle
    try:
        yield
    finally:
        handler.__torch_function__ = original


def record(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[ExportedGraph, Provenance]:
    """Exports a module and records where each node comes from.

    Args:
        module: The module, in the mode (`eval`, `train`) that is to be captured.
        args: Positional example inputs.
        kwargs: Keyword example inputs.

    Returns:
        The captured graph, not normalised, and the record of it.

    Raises:
        ExportError: The call cannot be traced.
    """
    from tilegym_fx.export import Holes, export_module, with_holes

    def attempt(holes: Holes) -> tuple[ExportedGraph, Provenance]:
        with recording(module) as recorder:
            exported = export_module(module, args, kwargs, holes=holes)
        return exported, recorder.finish(module, exported.graph_module.graph, exported.parameters)

    return with_holes(module, (args, dict(kwargs or {})), attempt)
