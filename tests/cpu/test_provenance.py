"""provenance: every node knows its call and expression, and every call its locals before each line."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emit_modules import WIDTH, Norm, Plain, Shared, TwoEps
from torch import fx, nn

from tilegym_fx.authored.source import function_source
from tilegym_fx.provenance import NodeRef, Provenance, record, recording

Tensor = torch.Tensor


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def helper(self, x: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        first = x * scale
        return first, first + 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        pair = self.helper(y)
        y = pair[0] + pair[1]
        return y


@pytest.fixture
def small() -> Provenance:
    return record(Small(), (torch.randn(3, WIDTH),))[1]


def node(record: Provenance, target: Any) -> fx.Node:
    return next(n for n in record.graph.nodes if n.target is target)


def call_of(record: Provenance, function: str) -> Any:
    return next(call for call in record.calls if call.code.co_name == function)


def test_every_computed_node_has_an_origin_in_model_code(small: Provenance) -> None:
    computed = [n for n in small.graph.nodes if n.op == "call_function"]
    assert computed
    assert all(small.origin(n) is not None for n in computed)


def test_site_names_module_class_and_frames_outermost_first(small: Provenance) -> None:
    site = small.site(node(small, torch.ops.aten.linear.default))
    assert (site.module_path, site.module_class) == ("proj", "Linear")
    assert [frame.function.rpartition(".")[2] for frame in site.frames] == ["forward", "forward"]
    assert site.frames[0].file == __file__


def test_origin_is_the_exact_expression(small: Provenance) -> None:
    origin = small.origin(node(small, torch.ops.aten.mul.Tensor))
    assert origin is not None
    source = function_source(origin.call.code)
    assert source is not None
    expr = source.expr_at(origin.offset)
    assert expr is not None
    assert source.text(expr) == "x * scale"


def test_locals_before_each_line_hold_graph_values(small: Provenance) -> None:
    call = call_of(small, "forward")
    helped = call_of(small, "helper")
    last = call.env(len(call.steps) - 1)
    linear = node(small, torch.ops.aten.linear.default)
    assert small.resolve(helped.env(0)["x"]) is linear
    assert helped.env(0)["scale"] == 2.0
    assert isinstance(last["pair"], tuple)
    assert all(isinstance(item, NodeRef) for item in last["pair"])
    assert small.resolve(last["y"]) is small.resolve(call.returned)


def test_call_tree_follows_the_calls(small: Provenance) -> None:
    helped = call_of(small, "helper")
    assert helped.parent is call_of(small, "forward")
    source = function_source(helped.parent.code)
    assert source is not None
    expr = source.expr_at(helped.parent_offset)
    assert expr is not None
    assert source.text(expr) == "self.helper(y)"


def test_one_function_run_twice_is_two_calls() -> None:
    record_of = record(TwoEps(), (torch.randn(3, WIDTH),))[1]
    runs = [call for call in record_of.calls if isinstance(call.module, Norm)]
    assert len(runs) == 2
    assert [record_of.module_paths(run.module)[0] for run in runs] == ["small", "large"]


def test_parameter_is_known_by_its_placeholder() -> None:
    model = Plain()
    record_of = record(model, (torch.randn(3, WIDTH), torch.randn(3, WIDTH)))[1]
    ref = record_of.tensor(model.norm.weight)
    assert ref is not None
    placeholder = record_of.resolve(ref)
    assert placeholder is not None
    assert record_of.held[placeholder.name] == "norm.weight"


def test_shared_module_is_known_as_itself() -> None:
    model = Shared()
    record_of = record(model, (torch.randn(3, WIDTH),))[1]
    assert {call.module for call in record_of.calls if isinstance(call.module, Norm)} == {model.first.norm}


def test_recording_puts_everything_back() -> None:
    create_node, trace, model = fx.Graph.create_node, sys.gettrace(), Small()
    with pytest.raises(ZeroDivisionError), recording(model):
        raise ZeroDivisionError
    assert fx.Graph.create_node is create_node
    assert sys.gettrace() is trace
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_only_the_modules_own_call_is_traced() -> None:
    model, x = Small(), torch.randn(3, WIDTH)
    traces = []
    with recording(model) as recorder:
        traces.append(sys.gettrace())
        model(x)
        traces.append(sys.gettrace())
    assert traces == [sys.gettrace()] * 2
    assert recorder._calls


def test_failing_call_does_not_upset_the_record() -> None:
    class Catching(nn.Module):
        def fail(self, x: Tensor) -> Tensor:
            raise ValueError

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.fail(x)
            except ValueError:
                x = x + 1
            return x * 2

    record_of = record(Catching(), (torch.randn(3),))[1]
    origin = record_of.origin(node(record_of, torch.ops.aten.mul.Tensor))
    assert origin is not None
    assert origin.call.code.co_name == "forward"


@pytest.fixture
def finalised() -> Iterator[Any]:
    """Garbage of another library that a collector finds at every turn: each one's end begins the next."""
    names: dict[str, Any] = {}
    exec(compile(_FINALISED, "/site-packages/other/things.py", "exec"), names)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    names["Thing"]()
    yield names["Thing"]
    gc.set_threshold(*before)
    names["Thing"].others = 0


_FINALISED = """
class Thing:
    ended, others = 0, 1

    def __init__(self):
        self.itself = self

    def __del__(self):
        Thing.ended += 1
        if Thing.others:
            Thing()
"""


def test_what_the_garbage_collector_calls_is_no_call_of_the_model(finalised: Any) -> None:
    recorded = record(Small(), (torch.randn(3, WIDTH),))[1]
    assert finalised.ended > 100
    assert [call.code.co_name for call in recorded.calls] == ["forward", "forward", "helper"]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        record(Small(), (torch.randn(3, WIDTH),))
        assert not gc.isenabled()
    finally:
        gc.enable()
