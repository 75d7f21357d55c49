"""The pass over a plain function or module: counts, the graph left over, its numbers, held in one call."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from parts import PLAIN
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree

from tilegym_fx import inventory
from tilegym_fx.cost import get_device
from tilegym_fx.normalize import normalize
from tilegym_fx.pipeline import Outcome, find, matcher_for
from tilegym_fx.plan import Policy
from tilegym_fx.results import Site
from tilegym_fx.rewrite import rewrite

INVENTORY = inventory.load()
BF16, FP32 = torch.bfloat16, torch.float32
#: With ``dynamic=True`` every dimension of these sizes is symbolic: other dimensions must have other sizes.
BATCH, LENGTH = 3, 7
_OTHER_SIZES = {BATCH: 5, LENGTH: 11}

Code = Callable[..., Any] | nn.Module


def everywhere(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in bf16 and fp32, with static and with dynamic shapes."""
    names = {BF16: "bf16", FP32: "fp32"}
    marked = pytest.mark.parametrize("dtype", names, ids=list(names.values()))(test)
    return pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])(marked)


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same each time for the same shape and seed."""
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random).to(dtype)


def capture(code: Code, inputs: Sequence[Any], *, dynamic: bool = False) -> GraphModule:
    """The ATen graph of the code before decomposition, as the backend captures it."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [_fake(mode, value, dynamic) for value in inputs]

    def flat(*values: Any) -> Any:  # make_fx would fill in the defaults of the code's own parameters
        return code(*values)

    with torch.no_grad(), mode:
        return make_fx(flat, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)


def _fake(mode: FakeTensorMode, value: Any, dynamic: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_open = [dynamic and size in _OTHER_SIZES for size in value.shape]
    sizes = [DimDynamic.DUCK if is_it else DimDynamic.STATIC for is_it in is_open]
    return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def functional(code: Code, inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A module as a function of its parameters too; a function as it is."""
    if not isinstance(code, nn.Module):
        return code, list(inputs)
    state = {**dict(code.named_parameters()), **dict(code.named_buffers())}

    def call(*values: Any) -> Any:
        given = dict(zip(state, values, strict=False))
        return functional_call(code, given, values[len(state) :])

    return call, [*(value.detach() for value in state.values()), *inputs]


def find_in(graph_module: GraphModule, *, only: Sequence[str] | None = None, device: str = "h200") -> Outcome:
    """Normalise, match and plan with the shipped inventory; the graph is left in normal form."""
    policy = Policy(get_device(device), list(INVENTORY.definitions) if only is None else only)
    return find(graph_module.graph, INVENTORY, policy, lambda node: Site())


def counts(outcome: Outcome) -> dict[str, int]:
    """Definition -> how many of its Matches are taken."""
    return dict(Counter(planned.match.definition for planned in outcome.chosen))


def check_pass(
    code: Code,
    inputs: Sequence[Any],
    expected: Mapping[str, int],
    *,
    left: int | None = 0,
    dynamic: bool = False,
    refused: Mapping[str, str] | None = None,
    only: Sequence[str] | None = PLAIN,
) -> Outcome:
    """Capture, match, rewrite and run.

    Args:
        code: As a model's author writes it.
        inputs: Its arguments.
        expected: Definition -> number of places that must be rewritten, no more and no others.
        left: How many calls must remain besides ours; None for any number.
        dynamic: Make dimensions of size BATCH and LENGTH symbolic, and run at other sizes too.
        refused: Definition -> pattern that one of its Rejections' reasons must fit.
        only: Definitions to allow; None for all. Those of `parts.PLAIN` if left out.
    """
    function, values = functional(code, inputs)
    graph_module = capture(function, values, dynamic=dynamic)
    guards = guards_of(graph_module)
    outcome = find_in(graph_module, only=only)
    taken = counts(outcome)
    assert taken == dict(expected), (
        taken,
        [(r.definition, r.spelling, r.reason) for r in outcome.rejections],
    )
    for definition, pattern in (refused or {}).items():
        reasons = reasons_in(graph_module, definition)
        assert any(re.search(pattern, reason) for reason in reasons), reasons
    _rewrite_and_count(graph_module, outcome, left)
    assert guards_of(graph_module) == guards, "the pass must not narrow the sizes that the graph is for"
    for given in (values, [_resized(v) for v in values]) if dynamic else (values,):
        assert_same_numbers(graph_module, function, given)
    return outcome


def reasons_in(graph_module: GraphModule, definition: str) -> list[str]:
    """Why places in a normal graph are no Match of a Definition, those that another Match covers included."""
    _, rejections = matcher_for(INVENTORY, INVENTORY.definitions).match(graph_module.graph, lambda node: Site())
    return [r.reason for r in rejections if r.definition == definition]


def guards_of(graph_module: GraphModule) -> list[str]:
    """What the graph assumes of its symbolic sizes."""
    values = (node.meta.get("val") for node in graph_module.graph.nodes)
    modes = (value.fake_mode for value in values if hasattr(value, "fake_mode"))
    mode = next((m for m in modes if m.shape_env is not None), None)
    return [str(guard.expr) for guard in mode.shape_env.guards] if mode else []


def _rewrite_and_count(graph_module: GraphModule, outcome: Outcome, left: int | None) -> None:
    before = _calls(graph_module)
    shared = {node for p in outcome.chosen for node in p.match.shared}
    results = [len(p.match.outputs) - len(p.match.written) for p in outcome.chosen]
    added = sum(1 if count == 1 else 1 + count for count in results)
    assert rewrite(graph_module.graph, outcome.plan) == len(outcome.chosen)
    graph_module.recompile()
    unread = shared - set(graph_module.graph.nodes)
    gone = {*unread, *(node for p in outcome.chosen for node in p.match.nodes)}
    assert len(_calls(graph_module)) == len(before) - len(gone) + added
    others = [n for n in _calls(graph_module) if "tilegym_fx" not in n.meta and not _is_size(n)]
    assert left is None or len(others) == left, others


def _calls(graph_module: GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "call_function"]


def _is_size(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int or getattr(node.target, "__module__", "") == "_operator"


def _resized(value: Any) -> Any:
    """The value with every symbolic dimension at another size."""
    if isinstance(value, torch.Tensor):
        for dim, size in enumerate(value.shape):
            if size in _OTHER_SIZES:
                places = torch.arange(_OTHER_SIZES[size]) % size
                value = value.index_select(dim, places)
    return value


def normal(code: Code, inputs: Sequence[Any], *, dynamic: bool = False) -> Graph:
    """The graph in normal form, having checked that it computes what it did."""
    graph_module = capture(code, inputs, dynamic=dynamic)
    normalize(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    assert_same_numbers(graph_module, code, inputs)
    return graph_module.graph


def assert_same_numbers(rewritten: Callable[..., Any], original: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Outputs, and inputs written in place, are as near a wider run as those of the original."""
    runs = [[_copy(v) for v in inputs], [_copy(v) for v in inputs], _widened(inputs)]
    with torch.no_grad():
        got, want, wide = (
            [*_pytree.tree_leaves(f(*values)), *values]
            for f, values in zip((rewritten, original, original), runs, strict=True)
        )
    for a, b, exact in zip(got, want, wide, strict=True):
        if isinstance(b, torch.Tensor):
            assert_as_exact(a, b, exact)


def assert_as_exact(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> None:
    """``got`` has the type of ``want`` and at most twice its distance from ``exact``, plus one rounding."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return
    if want.numel() == 0:
        return
    rounding = torch.finfo(want.dtype).eps * exact.abs().max().item()
    allowed = 2 * (want.double() - exact.double()).abs().max().item() + rounding
    assert (got.double() - exact.double()).abs().max().item() <= allowed


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _widened(inputs: Sequence[Any]) -> list[Any]:
    """All that is floating in float32, or in float64 if it was float32."""
    floating = [v for v in inputs if isinstance(v, torch.Tensor) and v.is_floating_point()]
    wide = torch.float64 if all(v.dtype == FP32 for v in floating) else FP32
    return [v.to(wide) if any(v is f for f in floating) else _copy(v) for v in inputs]
