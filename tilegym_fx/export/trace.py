"""Captures any module with sample inputs, and leaves it as it was."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.fx.experimental import proxy_tensor

from tilegym_fx.errors import ExportError
from tilegym_fx.export.holes import Holes, with_holes
from tilegym_fx.export.regions import drop_capture_noise, flatten_regions
from tilegym_fx.results import Phase

#: What running, building or tracing somebody else's model can raise; torch's tracing errors are among them.
MODEL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
#: Where the classes of transformers live, and those of code that it loaded from elsewhere.
_TRANSFORMERS = ("transformers.", "transformers_modules.")


@dataclass(frozen=True)
class ExportedGraph:
    """A captured model.

    Attributes:
        graph_module: The flat ATen graph, with ``val``, ``nn_module_stack`` and ``stack_trace`` in each meta.
        phase: Which call of the model it is.
        seconds: Wall time of the capture, its inputs included.
        model: The module that was captured.
        parameters: Placeholder -> name of the parameter or buffer in the module. Of the placeholders of a
            tied weight one is read.
        stages: Wall time of each step, adding up to ``seconds``.
        holes: Class of a block that could not be traced and is one opaque operation -> why.
    """

    graph_module: GraphModule
    phase: Phase
    seconds: float
    model: nn.Module
    parameters: Mapping[str, str]
    stages: Mapping[str, float]
    holes: Mapping[str, str] = field(default_factory=dict)

    def copy(self) -> Graph:
        """Its graph with new nodes, for a pass that changes it; names and meta are kept."""
        new = Graph()
        new.output(new.graph_copy(self.graph_module.graph, {}))
        return new


def export_module(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    phase: Phase = "prefill",
    dynamic_shapes: Any = None,
    holes: Holes | None = None,
) -> ExportedGraph:
    """Capture one call of a module. Blocks of it that cannot be traced are left out, as :mod:`.holes` tells.

    Works on ``meta``, CPU and CUDA modules alike: the trace runs on fake tensors, so nothing is computed and
    no weight is copied. The module, its buffers and its attributes are as before when this returns.

    Args:
        module: Any module, in the mode (train or eval) that its user left it in.
        args: Positional sample inputs; their values do not matter, a transformers cache may be among them.
        kwargs: Keyword sample inputs.
        phase: What to call the graph.
        dynamic_shapes: As in ``torch.export.export``. By default every size is static, and attention masks
            that the model skips when it runs are skipped in the graph.
        holes: Leave out these blocks and no others; by default those that turn out to need it.

    Raises:
        ExportError: The call cannot be traced; the message names the model's own line where there is one.
    """
    inputs = dict(kwargs or {})
    if holes is None:
        return with_holes(
            module,
            (args, inputs),
            lambda found: export_module(module, args, inputs, phase=phase, dynamic_shapes=dynamic_shapes, holes=found),
        )
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(unchanged(module))
        stack.enter_context(holes.made(module))
        stack.enter_context(copies_as_clones())
        stack.enter_context(numbers_as_fills())
        stack.enter_context(this_thread_alone())
        stack.enter_context(without_torch_errors())
        enter_transformers(stack, module, inputs, static=dynamic_shapes is None)
        program = _trace(module, args, inputs, dynamic_shapes)
    traced = time.perf_counter()
    graph_module = program.graph_module
    flatten_regions(graph_module)
    drop_capture_noise(graph_module)
    done = time.perf_counter()
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    stages = {"trace": traced - started, "flatten": done - traced}
    return ExportedGraph(
        graph_module,
        phase,
        done - started,
        module,
        MappingProxyType(names),
        MappingProxyType(stages),
        MappingProxyType(holes.named),
    )


def _trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    said = io.StringIO()
    try:
        # Of a capture that fails, torch prints the whole graph so far: the error alone says enough.
        with warnings.catch_warnings(), redirect_stderr(said):
            # That attributes were assigned does not matter: they are taken back.
            warnings.filterwarnings("ignore", message=".*assigned during export")
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        sys.stderr.write(said.getvalue())
        return program
    except MODEL_ERRORS as error:
        raise ExportError(f"{type(module).__name__} cannot be exported: {describe(error)}") from error


@contextmanager
def copies_as_clones() -> Iterator[None]:
    """Lets a model deep-copy its cache while it is traced: torch refuses for tensors without memory."""

    def cloned(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(tensor), tensor.clone())

    kinds = [kind for kind in (FakeTensor, FunctionalTensor) if "__deepcopy__" not in vars(kind)]
    for kind in kinds:
        setattr(kind, "__deepcopy__", cloned)  # noqa: B010 - no class may be assigned to under a type checker
    try:
        yield
    finally:
        for kind in kinds:
            delattr(kind, "__deepcopy__")


@contextmanager
def this_thread_alone() -> Iterator[None]:
    """Leaves the calls that other threads make of modules out of a trace: torch watches those of the whole process."""
    tracer: Any = getattr(proxy_tensor, "_ModuleStackTracer", None)
    if tracer is None:
        yield
        return
    here, call, read = threading.get_ident(), tracer.call_module, tracer.getattr

    def call_module(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_ours = threading.get_ident() == here
        return call(self, module, forward, args, kwargs) if is_ours else forward(*args, **kwargs)

    def read_attribute(self: Any, name: str, value: Any, cache: Any) -> Any:
        return read(self, name, value, cache) if threading.get_ident() == here else value

    tracer.call_module, tracer.getattr = call_module, read_attribute
    try:
        yield
    finally:
        tracer.call_module, tracer.getattr = call, read


@contextmanager
def numbers_as_fills() -> Iterator[None]:
    """Lets ``torch.tensor(number)`` on ``meta`` be a fill: the graph tells of a fill what number it is."""
    make = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is None or torch.device(device).type != "meta" or not isinstance(data, bool | int | float):
            return make(data, **options)
        return torch.full((), data, **options)

    setattr(torch, "tensor", tensor)  # noqa: B010 - no module may be assigned to under a type checker
    try:
        yield
    finally:
        setattr(torch, "tensor", make)  # noqa: B010


@contextmanager
def without_torch_errors() -> Iterator[None]:
    """Keeps what torch logs of errors off the terminal: a whole traceback of what we raise, or find a way around."""
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("torch.")]
    handlers = {handler for name in ("torch", *names) for handler in logging.getLogger(name).handlers}

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    for handler in handlers:
        handler.addFilter(is_no_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_no_error)


def describe(error: BaseException) -> str:
    """An error of somebody else's code in one line: its class, its first line, and where it was raised."""
    text = (str(error).strip() or "no message").splitlines()[0].rstrip(". ")
    where = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name == "forward" and "torch/" not in code.co_filename.replace("\\", "/"):
            where = f" (at {code.co_filename}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {text}{where}"


def enter_transformers(stack: ExitStack, module: nn.Module, inputs: Mapping[str, Any], *, static: bool) -> None:
    """What only models of transformers need; modules of other people never import it."""
    if not any(type(part).__module__.startswith(_TRANSFORMERS) for part in module.modules()):
        return
    from tilegym_fx.export import caches

    caches.register(module)
    if static:
        stack.enter_context(caches.masks_as_when_run(inputs))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back every attribute, parameter and buffer that the body sets, adds or deletes in a module."""
    tables = [table for part in module.modules() for table in _tables(part)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, saved in zip(tables, before, strict=True):
            if table.keys() != saved.keys() or any(table[key] is not value for key, value in saved.items()):
                table.clear()
                table.update(saved)


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._buffers, module._modules
