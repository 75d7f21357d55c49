"""A sketch is the graph that make_fx gives, or none: of every form in the inventory, and of what it cannot know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from pass_checks import BF16, INVENTORY, rand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tilegym_fx import pattern
from tilegym_fx.facts import graph_facts
from tilegym_fx.pattern import form_patterns, trace
from tilegym_fx.probes import probes
from tilegym_fx.sketch import sketch

aten = torch.ops.aten
CONSTANT = torch.ones(4)
UNTRACEABLE = (RuntimeError, TypeError, ValueError)


def seen(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """The normal graph as the matcher sees it; None where the function does not run at these inputs."""
    try:
        graph, tensors, outputs = trace(function, inputs)
    except UNTRACEABLE:
        return None
    facts = graph_facts(graph)
    index = {node: i for i, node in enumerate([*tensors.values(), *facts])}
    calls = [(str(f.operation), [index[o] for o in f.operands], str(f.literals)) for f in facts.values()]
    return calls, [index[output] for output in outputs]


def fakes(inputs: Mapping[str, Any]) -> dict[str, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


@pytest.mark.parametrize("name", sorted(INVENTORY.definitions))
def test_every_form_is_sketched_as_it_is_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta, as probes are, and on fake tensors, as places are."""
    definition = INVENTORY.definitions[name]
    drawn = []
    for form in (patterns.form for patterns in form_patterns(INVENTORY, name)):
        for probe in probes(definition):
            inputs = {**probe.inputs(definition), **form.fixed}
            monkeypatch.setattr(pattern, "sketch", lambda *_: None)
            traced = seen(form.function, fakes(inputs))
            monkeypatch.setattr(pattern, "sketch", lambda *given: drawn.append(sketch(*given)) or drawn[-1])
            assert seen(form.function, inputs) == traced, (form.name, probe)
            assert seen(form.function, fakes(inputs)) == traced, (form.name, probe)
    assert drawn
    assert None not in drawn


def calls(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device="meta")


def filled(x: Any) -> Any:
    new = torch.empty(4, 8, dtype=x.dtype, device=x.device)
    new[:, :4] = x
    new[:, 4:] = torch.zeros_like(x)
    left, right = new.chunk(2, -1)
    return left, right + new[:, :4].add_(1)


def test_calls_are_kept_before_their_decomposition() -> None:
    def code(x: Any, y: Any) -> Any:
        return torch.nn.functional.rms_norm(torch.nn.functional.linear(x, y), (4,)).softmax(-1)

    drawn = sketch(code, {"x": meta(4, 4), "y": meta(4, 4)})
    assert drawn is not None
    graph, placeholders = drawn
    assert calls(graph) == [aten.linear.default, aten.rms_norm.default, aten.softmax.int]
    assert list(placeholders) == ["x", "y"]
    assert all("val" in node.meta for node in graph.nodes if node.op != "output")


def test_memory_that_is_made_written_and_split_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": meta(4, 4)}
    with torch.no_grad():
        assert sketch(filled, inputs) is not None
    drawn = seen(filled, inputs)
    monkeypatch.setattr(pattern, "sketch", lambda *_: None)
    assert drawn == seen(filled, fakes(inputs))


def test_one_tensor_in_two_places_is_two_inputs() -> None:
    x = meta(4, 4)
    graph, tensors, _ = trace(lambda x, y: x + y.sin(), {"x": x, "y": x})
    assert len(set(tensors.values())) == 2
    assert [node.args[0] for node in graph.find_nodes(op="call_function", target=aten.sin.default)] == [tensors["y"]]


def switched(x: Any) -> Any:
    with torch.no_grad():
        return x.sin()


def cast_by_autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=BF16):
        return x.sin()


@pytest.mark.parametrize("code", [lambda x: x + CONSTANT, lambda x: x * torch.tensor(2.0), switched, cast_by_autocast])
def test_what_no_recorded_call_has_made_is_left_to_a_trace(code: Callable[..., Any]) -> None:
    x = fakes({"x": rand(4, 4)})
    assert sketch(code, x) is None
    graph, _, outputs = trace(code, x)
    assert all(isinstance(output, Node) for output in outputs)
    assert calls(graph)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_batched_tensors_are_no_values_of_recorded_calls() -> None:
    assert sketch(lambda x: torch.vmap(torch.sin)(x), {"x": meta(4, 4)}) is None


def test_symbolic_sizes_are_left_to_a_trace() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(rand(4, 6))
    assert isinstance(x.shape[0], torch.SymInt)
    assert sketch(torch.sin, {"input": x}) is None
    assert calls(trace(lambda x: x.sin().view(-1), {"x": x})[0])[-1] is aten.reshape.default


def test_a_function_that_fails_leaves_nothing_behind() -> None:
    def code(x: Any) -> Any:
        return x.sin().view(5, 5)

    with pytest.raises(RuntimeError):
        sketch(code, {"x": meta(4, 4)})
    assert get_proxy_mode() is None
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)


def test_finding_patterns_needs_no_make_fx() -> None:
    """What a first match in a process costs is mostly that."""
    script = (
        "import torch.fx.experimental.proxy_tensor as tensor\n"
        "from tilegym_fx import pattern\n"
        "from tilegym_fx.inventory import load\n"
        "from tilegym_fx.pipeline import matcher_for\n"
        "pattern.make_fx = None\n"
        "print(len(matcher_for(load())._patterns))\n"
    )
    found = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert int(found.stdout) > len(INVENTORY.definitions)
