"""``torch.compile(model, backend="tilegym_fx")``: the pass over each captured graph, the rest to inductor.

Dynamo's torch-level graph is traced to ATen before decomposition, under its own fake tensors and symbolic
shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx

from . import reports
from .cost import device_of
from .errors import UsageError, did_you_mean
from .export.sites import site_of
from .inventory import load
from .normalize import pin_gradients
from .ops import lower_as_calls, tell_of_references, usual_device, what_runs
from .pipeline import Outcome, find
from .plan import Policy
from .results import Plan, Rejection
from .rewrite import rewrite

log = logging.getLogger("tilegym_fx")
_OWN_OPTIONS = ("inner", "only", "skip")
_INNERS = ("inductor", "eager")
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def tilegym_fx_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile`` finds under the name ``tilegym_fx``.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        mode: As for inductor (``reduce-overhead``, ``max-autotune``...).
        options: Inductor's, and besides ``inner`` (``inductor`` or ``eager``), ``only`` and ``skip``
            (names of Definitions, or one).

    Raises:
        UsageError: If ``inner`` is unknown, an option is neither ours nor inductor's, or one of inductor's is given
            for ``eager``.
    """
    options = dict(options or {})
    own = {name: options.pop(name) for name in _OWN_OPTIONS if name in options}
    inner = own.pop("inner", "inductor")
    if inner not in _INNERS:
        advice = f"Use one of {', '.join(_INNERS)}{did_you_mean(inner, _INNERS)}"
        raise UsageError(f"inner={inner!r} is no inner compiler", advice=advice)
    if inner == "eager" and (mode or options):
        unknown = next(iter(options), "mode")
        advice = f"Leave it out, or use inner='inductor'{did_you_mean(unknown, _OWN_OPTIONS)}"
        raise UsageError(f"inner='eager' takes no {unknown!r}", advice=advice)
    _require_known(options)
    reason = _unknown_dtypes(gm) or _hidden_gradients(gm)
    if reason is not None:
        return _left_alone(gm, example_inputs, inner, mode, options, reason)
    aten_graph = to_aten(gm, example_inputs)
    reason = _lost_values(aten_graph)
    if reason is not None:
        return _left_alone(gm, example_inputs, inner, mode, options, reason)
    pin_gradients(aten_graph.graph, torch.is_grad_enabled())
    device = _device(example_inputs)
    policy = Policy(device_of(device), **own)
    outcome = find(aten_graph.graph, load(), policy, site_of, keep_layouts=True)
    rewrite(aten_graph.graph, outcome.plan)
    aten_graph.recompile()
    reports.add(replace(outcome, runs=what_runs(device)))
    if outcome.chosen:
        tell_of_references(device)
    return aten_graph if inner == "eager" else _inductor(aten_graph, example_inputs, mode, options)


def _require_known(options: Iterable[str]) -> None:
    """Inductor says of an option that it has not only that, and not which one was meant."""
    from torch._inductor import config

    for name in options:
        try:
            attrgetter(name)(config)
        except AttributeError as problem:
            near = did_you_mean(name, (*_OWN_OPTIONS, *config.get_config_copy()))
            advice = f"Ours are {', '.join(_OWN_OPTIONS)}; all others are torch._inductor.config's{near}"
            raise UsageError(f"there is no option {name!r}", advice=advice) from problem


def _left_alone(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner: str,
    mode: str | None,
    options: dict[str, Any],
    reason: str,
) -> Callable[..., Any]:
    log.warning("a graph is left as it is: %s", reason)
    nothing = Rejection("every Definition", "any", lambda: reason, ())
    reports.add(Outcome(Plan((), (nothing,)), len(gm.graph.nodes)))
    return gm if inner == "eager" else _inductor(gm, example_inputs, mode, options)


def _unknown_dtypes(gm: GraphModule) -> str | None:
    """Why the dtypes of the graph's values are not known before it runs, or None.

    Autocast chooses dtypes below the level at which the graph is traced.
    """
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return "autocast is on around it, and chooses the dtypes when it runs"
    for node in gm.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            if enabled:
                return "it turns autocast on, which chooses the dtypes when it runs"
    return None


def _hidden_gradients(gm: GraphModule) -> str | None:
    """Why a trace of the graph would lose a gradient that its author wrote, or None.

    A trace sees through these operators, and keeps only what they compute in the forward direction.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        target = node.target
        if isinstance(target, HigherOrderOperator) and (
            ProxyTorchDispatchMode not in target.python_key_table or target is _CHECKPOINT
        ):
            return f"{target.name()} has a backward of its own, which a trace does not keep"
    return None


def _lost_values(traced: GraphModule) -> str | None:
    """Why the traced graph is not the whole one, or None: a value without an operation became a constant."""
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, str(node.target), None), FakeTensor):
            return f"{node.name} comes from something that no operation tells, such as .data"
    return None


def to_aten(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Trace a torch-level graph to ATen, not decomposed, on fake inputs."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [n.meta.get("example_value", value) for n, value in zip(placeholders, example_inputs, strict=True)]
    # The fakes that Dynamo traced with, whose mode need not be the tracing context's any more.
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or detect_fake_mode(values)
    with mode or nullcontext():  # tensors that the graph makes itself must be fake too
        if mode is not None:
            values = [mode.from_tensor(v) if _is_real(v) else v for v in values]
        traced = make_fx(gm, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    for node, value in zip(traced.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["requires_grad"] = isinstance(value, torch.Tensor) and value.requires_grad
    _keep_dynamo_notes(gm, traced)
    return traced


def _keep_dynamo_notes(gm: GraphModule, traced: GraphModule) -> None:
    """Hand on what Dynamo knows of the inputs: else none counts as static, and no CUDA graph replays."""
    traced.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        held = [name for name, _ in (*traced.named_parameters(), *traced.named_buffers())]
        sources: dict[str, Any] = {name: ConstantSource(source_name=f"tilegym_fx.{name}") for name in held}
        sources.update(cast("dict[str, Any] | None", gm._param_name_to_source) or {})
        vars(traced)["_param_name_to_source"] = sources  # a plain attribute, no module or buffer
    inputs = (g.graph.find_nodes(op="placeholder") for g in (gm, traced))
    for old, new in zip(*inputs, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if "tensor_dict" in old.meta:
            new.meta["tensor_dict"] = old.meta["tensor_dict"]


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """Where the graph runs: its other inputs may be numbers on the CPU."""
    found = [t.device for t in example_inputs if isinstance(t, torch.Tensor)]
    return next((device for device in found if device.type == "cuda"), found[0] if found else usual_device())


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any],
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    lower_as_calls()
    patches = {**(list_mode_options(mode) if mode else {}), **options}
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
    return cast("Callable[..., Any]", compiled)


def _register() -> None:
    """Make the name known where the package has no entry point: a source tree on the path."""
    from torch._dynamo.backends.registry import list_backends, register_backend

    if "tilegym_fx" not in list_backends(exclude_tags=()):
        register_backend(tilegym_fx_backend, name="tilegym_fx")


_register()
