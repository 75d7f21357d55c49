"""A plan carried out: what new nodes carry, what stays, and the order around writes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import capture, find_in, rand
from torch.fx import Graph, GraphModule, Node

from tilegym_fx.errors import RewriteError
from tilegym_fx.results import Match, Plan, PlannedMatch
from tilegym_fx.rewrite import rewrite

NAMES = ("rms_norm", "add_rms_norm", "silu_mul")
ROWS = (rand(5, 64), rand(5, 64, seed=1), rand(64))


def rewritten(code: Callable[..., Any], inputs: Sequence[Any] = ROWS) -> GraphModule:
    """The graph after the pass; its numbers equal the code's."""
    graph_module = capture(code, inputs)
    outcome = find_in(graph_module, only=NAMES)
    assert rewrite(graph_module.graph, outcome.plan) == len(outcome.chosen)
    graph_module.recompile()
    got, want = graph_module(*_clones(inputs)), code(*_clones(inputs))
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    return graph_module


def _clones(inputs: Sequence[Any]) -> list[Any]:
    return [x.clone() for x in inputs]


def ours(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if "tilegym_fx" in node.meta]


def names(graph_module: GraphModule) -> list[str]:
    calls = (n for n in graph_module.graph.nodes if n.op == "call_function")
    return [getattr(n.target, "overloadpacket", n.target).__name__ for n in calls]


def add_norm(x: Any, y: Any, w: Any) -> Any:
    total = x + y
    return torch.tanh(total), blocks.rms_norm(total, w)


class TestNodes:
    def test_a_call_names_its_definition_and_keeps_where_it_comes_from(self) -> None:
        graph_module = capture(lambda x, y, w: F.silu(x) * y, ROWS)
        outcome = find_in(graph_module, only=NAMES)
        outcome.chosen[0].match.outputs[0].meta["stack_trace"] = "the author's line"
        rewrite(graph_module.graph, outcome.plan)
        (call,) = ours(graph_module)
        assert call.target is torch.ops.tilegym_fx.silu_mul.default
        assert call.meta["tilegym_fx"] == "silu_mul"
        assert call.meta["stack_trace"] == "the author's line"
        assert (call.meta["val"].shape, call.meta["val"].dtype) == ((5, 64), torch.bfloat16)

    def test_several_outputs_are_items_of_one_call(self) -> None:
        graph_module = rewritten(add_norm)
        call, *items = ours(graph_module)
        assert call.target is torch.ops.tilegym_fx.add_rms_norm.default
        assert [item.args for item in items] == [(call, 0), (call, 1)]
        assert names(graph_module).count("tanh") == 1

    def test_what_nobody_reads_any_more_is_gone(self) -> None:
        calls = [n for n in rewritten(lambda x, y, w: F.silu(x) * y).graph.nodes if n.op == "call_function"]
        assert len(calls) == 1

    def test_a_cast_that_others_read_stays(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            wide = x.float()
            return blocks.rms_norm(x, w), wide.amax(-1)

        graph_module = rewritten(code)
        assert len(ours(graph_module)) == 1
        assert {"to", "amax"} <= set(names(graph_module))

    def test_one_result_feeds_the_next(self) -> None:
        graph_module = rewritten(lambda x, y, w: blocks.rms_norm(F.silu(x) * y, w))
        gate, norm = ours(graph_module)
        assert norm.args[0] is gate

    def test_an_empty_plan_changes_nothing(self) -> None:
        graph_module = capture(lambda x, y, w: torch.tanh(x), ROWS)
        before = [n.name for n in graph_module.graph.nodes]
        assert rewrite(graph_module.graph, Plan((), ())) == 0
        assert [n.name for n in graph_module.graph.nodes] == before


class TestOrder:
    def test_a_write_stays_after_the_reads_before_it(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            gated = F.silu(x) * y
            x.zero_()
            return gated, x + 1

        graph_module = rewritten(code)
        order = list(graph_module.graph.nodes)
        write = next(n for n in order if "zero" in str(n.target))
        assert order.index(ours(graph_module)[0]) < order.index(write)

    def test_a_write_stays_before_the_reads_after_it(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            x.mul_(2)
            return F.silu(x) * y

        graph_module = rewritten(code)
        order = list(graph_module.graph.nodes)
        write = next(n for n in order if "mul_" in str(n.target) and n not in ours(graph_module))
        assert order.index(write) < order.index(ours(graph_module)[0])

    def test_a_weight_made_after_the_sum_is_read_in_time(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            total = x + y
            return total, blocks.rms_norm(total, torch.tanh(w))

        assert len(ours(rewritten(code))) == 3


def chain() -> tuple[Graph, list[Node]]:
    """x, and three calls one after the other."""
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for target in (torch.ops.aten.tanh.default, torch.ops.aten.sin.default, torch.ops.aten.cos.default):
        nodes.append(graph.call_function(target, (nodes[-1],)))
    graph.output(nodes[-1])
    for node in nodes:
        node.meta["val"] = torch.empty(5, 64)
    return graph, nodes


class TestRefusals:
    """What the matcher never gives, and nobody may get past."""

    @staticmethod
    def plan_of(*matches: Match) -> Plan:
        return Plan(tuple(PlannedMatch(match, "silu_mul", 1.0, 0.5) for match in matches), ())

    def test_an_inner_value_that_is_read_outside(self) -> None:
        graph, (x, first, second, third) = chain()
        match = Match("silu_mul", "reference", "exact", {"gate": x, "up": x}, (third,), (first, third))
        with pytest.raises(RewriteError, match=f"{first.name} of silu_mul is still read by {second.name}"):
            rewrite(graph, self.plan_of(match))

    def test_a_region_that_needs_its_own_result(self) -> None:
        graph, (_, first, _, third) = chain()
        match = Match("silu_mul", "reference", "exact", {"gate": third, "up": third}, (first,), (first,))
        with pytest.raises(RewriteError, match="need each other's result"):
            rewrite(graph, self.plan_of(match))
