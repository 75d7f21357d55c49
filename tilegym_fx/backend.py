"""``torch.compile(model, backend="tilegym_fx")``: the pass over each captured graph, the rest to inductor.

Dynamo's torch-level graph is traced to ATen before decomposition, under its own fake tensors and symbolic
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from . import reports
from .cost import device_of
from .errors import UsageError
from .export.sites import site_of
from .inventory import load
from .pipeline import find
from .plan import Policy
from .rewrite import rewrite

if TYPE_CHECKING:
    from .inventory import Inventory

_OWN_OPTIONS = ("inner", "only", "skip")
_INNERS = ("inductor", "eager")


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
            (collections of Definition names).

    Raises:
        UsageError: If ``inner`` is unknown, or ``mode`` is given for ``eager``.
    """
    options = dict(options or {})
    own = {name: options.pop(name) for name in _OWN_OPTIONS if name in options}
    inner = own.pop("inner", "inductor")
    if inner not in _INNERS:
        raise UsageError(f"inner={inner!r} is no inner compiler", advice=f"Use one of {', '.join(_INNERS)}")
    inventory = load()
    aten_graph = to_aten(gm, example_inputs)
    policy = Policy(device_of(_cuda_device(example_inputs)), **own)
    outcome = find(aten_graph.graph, inventory, policy, site_of)
    rewrite(aten_graph.graph, outcome.plan)
    aten_graph.recompile()
    reports.add(outcome)
    if inner == "eager":
        return aten_graph
    return _inductor(aten_graph, example_inputs, mode, options, inventory)


def to_aten(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Trace a torch-level graph to ATen, not decomposed, on fake inputs."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [
        n.meta.get("example_value", value) for n, value in zip(placeholders, example_inputs, strict=True)
    ]
    # The fakes that Dynamo traced with, whose mode need not be the tracing context's any more.
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or detect_fake_mode(values)
    with mode or nullcontext():  # tensors that the graph makes itself must be fake too
        if mode is not None:
            values = [mode.from_tensor(v) if _is_real(v) else v for v in values]
        return make_fx(gm, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _cuda_device(example_inputs: Sequence[Any]) -> torch.device | None:
    return next((t.device for t in example_inputs if isinstance(t, torch.Tensor) and t.is_cuda), None)


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any],
    inventory: Inventory,
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
    return cast("Callable[..., Any]", compiled)
