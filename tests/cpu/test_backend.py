"""The torch.compile backend: its options, what it refuses, what it leaves alone, and what it reports."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import blocks
import emit_modules
import pytest
import torch
import torch.nn.functional as F
from fresh_compiler import fresh_compiler
from torch import nn
from torch.fx import Graph, GraphModule

import tilegym_fx
from tilegym_fx import kernelize, ops
from tilegym_fx.backend import tilegym_fx_backend
from tilegym_fx.errors import MatchError, UsageError
from tilegym_fx.ops import backends
from tilegym_fx.pipeline import Outcome
from tilegym_fx.reports import last_report, recent_reports

EAGER = {"inner": "eager", "only": ("silu_mul", "linear", "rms_norm")}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def compiled(code: Callable[..., Any], **more: Any) -> Any:
    fresh_compiler()
    return torch.compile(code, backend="tilegym_fx", options=EAGER, **more)


def taken(outcome: Outcome | None) -> dict[str, int]:
    assert outcome is not None
    return dict(Counter(planned.match.definition for planned in outcome.chosen))


def ran(code: Callable[..., Any], *inputs: torch.Tensor, **more: Any) -> list[Outcome]:
    """Runs the code as it is and compiled; equal results, and the outcomes of the graphs that there were."""
    with torch.no_grad():
        want = code(*[x.clone() for x in inputs])
        torch.testing.assert_close(compiled(code, **more)(*inputs), want)
    return list(recent_reports())


def test_a_report_can_be_printed() -> None:
    (outcome,) = ran(Gate(), torch.randn(2, 8))
    lines = str(outcome).splitlines()
    does = "run PyTorch references, as their tensors are on a CPU"
    assert lines[0] == f"a graph of {outcome.nodes} calls: 3 places {does}"
    assert [line.split() for line in lines[1:3]] == [["linear", "2"], ["silu_mul", "1"]]
    assert lines[3].startswith(f"  estimated coverage on h200: {outcome.coverage:.1%} of ")


def test_a_report_says_what_runs_where_the_graph_was_compiled() -> None:
    ops.set_backend("interpret")
    try:
        (outcome,) = ran(emit_modules.Norm(), torch.randn(2, emit_modules.WIDTH))
    finally:
        ops.set_backend("auto")
    assert "1 place runs kernels in the CPU interpreter" in str(outcome)
    assert "1 place that kernels can compute" in str(replace(outcome, runs=""))  # of a graph that nobody compiled


def test_a_cpu_is_told_once_by_either_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(call: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [str(w.message) for w in caught if "run their PyTorch references" in str(w.message)]

    def compile() -> None:
        ran(Gate(), torch.randn(2, 8))

    def put() -> None:
        kernelize(emit_modules.Norm(), inputs=torch.randn(2, emit_modules.WIDTH))

    for first, second in ((compile, put), (put, compile)):
        monkeypatch.setattr(backends, "_told_of_references", False)
        assert len(told(first)) == 1
        assert told(first) == told(second) == []
    monkeypatch.setattr(backends, "_told_of_references", False)
    assert told(lambda: ran(nn.Tanh(), torch.randn(2, 8))) == []  # no op of ours is in it
    assert str(last_report()).startswith("a graph of 1 calls: 0 places that kernels can compute")
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    assert told(compile) == told(put) == []


class TestOptions:
    def test_the_name_is_known_to_torch(self) -> None:
        assert "tilegym_fx" in torch._dynamo.list_backends()

    def test_an_unknown_inner_compiler_is_refused(self) -> None:
        with pytest.raises(UsageError, match="is no inner compiler"):
            tilegym_fx_backend(torch.fx.symbolic_trace(Gate()), [], options={"inner": "nvfuser"})

    @pytest.mark.parametrize("more", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
    def test_eager_takes_nothing_that_is_inductors(self, more: dict[str, Any]) -> None:
        options = {"inner": "eager", **more.get("options", {})}
        with pytest.raises(UsageError, match="inner='eager' takes no"):
            tilegym_fx_backend(torch.fx.symbolic_trace(Gate()), [], mode=more.get("mode"), options=options)

    def test_only_and_skip(self) -> None:
        fresh_compiler()
        options = {**EAGER, "skip": ("linear",)}
        with torch.no_grad():
            torch.compile(Gate(), backend="tilegym_fx", options=options)(torch.randn(3, 8))
        assert taken(last_report()) == {"silu_mul": 1}

    def test_a_definition_that_does_not_exist_is_refused(self) -> None:
        fresh_compiler()
        options = {"inner": "eager", "skip": ("silu_mlu",)}
        with pytest.raises((MatchError, torch._dynamo.exc.BackendCompilerFailed), match="silu_mlu"):
            torch.compile(Gate(), backend="tilegym_fx", options=options)(torch.randn(3, 8))

    def test_inductors_options_reach_inductor(self) -> None:
        fresh_compiler()
        options = {"only": ("silu_mul",), "max_autotune": False, "no_such_option": True}
        with pytest.raises(Exception, match="no_such_option"):
            torch.compile(Gate(), backend="tilegym_fx", options=options)(torch.randn(3, 8))

    @pytest.mark.parametrize(
        ("options", "meant"),
        [
            ({"onyl": ["silu_mul"]}, "only"),
            ({"onyl": ["silu_mul"], "inner": "eager"}, "only"),
            ({"epilogue_fussion": False}, "epilogue_fusion"),
            ({"triton.cudagraph": True}, "triton.cudagraphs"),
        ],
    )
    def test_a_misspelt_option_is_answered_with_the_nearest(self, options: dict[str, Any], meant: str) -> None:
        with pytest.raises(UsageError, match=f"did you mean .*`{meant}`"):
            tilegym_fx_backend(GraphModule(nn.Module(), Graph()), (), options=options)

    def test_only_and_cuda_graphs_go_together_as_options(self) -> None:
        fresh_compiler()
        options = {"only": ["silu_mul"], "triton.cudagraphs": True}
        with torch.no_grad():
            torch.compile(Gate(), backend="tilegym_fx", options=options)(torch.randn(3, 8))
        assert taken(last_report()) == {"silu_mul": 1}

    def test_modes_and_options_are_those_of_inductor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []

        def compile_fx(gm: Any, inputs: Any, config_patches: Any = None) -> Any:
            given.append(config_patches)
            return gm

        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
        fresh_compiler()
        with torch.no_grad():
            torch.compile(Gate(), backend="tilegym_fx", mode="reduce-overhead")(torch.randn(3, 8))
            fresh_compiler()
            torch.compile(Gate(), backend="tilegym_fx", options={"only": ("linear",), "epilogue_fusion": False})(
                torch.randn(3, 8)
            )
        assert given == [{"triton.cudagraphs": True}, {"epilogue_fusion": False}]


class TestGraphs:
    def test_what_fits_is_replaced_and_the_rest_stays(self) -> None:
        (outcome,) = ran(lambda x, y: torch.tanh(F.silu(x) * y), torch.randn(3, 8), torch.randn(3, 8))
        assert taken(outcome) == {"silu_mul": 1}

    def test_what_does_not_fit_is_left(self) -> None:
        (outcome,) = ran(lambda x, y: torch.tanh(torch.sigmoid(x) * y), torch.randn(3, 8), torch.randn(3, 8))
        assert taken(outcome) == {}

    def test_one_graph_serves_every_size_when_sizes_are_open(self) -> None:
        module = Gate()
        rewritten = compiled(module, dynamic=True)
        with torch.no_grad():
            for rows in (3, 5, 7):
                x = torch.randn(rows, 8)
                torch.testing.assert_close(rewritten(x), module(x))
        assert [taken(outcome) for outcome in recent_reports()] == [{"linear": 2, "silu_mul": 1}]

    def test_a_graph_break_makes_two_reports(self) -> None:
        def code(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = F.silu(x) * y
            torch._dynamo.graph_break()
            return F.silu(z) * y

        assert [taken(o) for o in ran(code, torch.randn(3, 8), torch.randn(3, 8))] == [{"silu_mul": 1}] * 2

    def test_a_write_in_place_of_an_input_is_seen_by_the_caller(self) -> None:
        def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return blocks.rms_norm(x, w)

        x, w = torch.randn(5, 64), torch.randn(64)
        seen = x.clone()
        (outcome,) = ran(code, x, w)
        assert taken(outcome) == {"rms_norm": 1}
        torch.testing.assert_close(x, seen * 2)

    def test_a_result_is_as_contiguous_as_before(self) -> None:
        def code(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (F.silu(x) * y).transpose(0, 1)

        with torch.no_grad():
            got = compiled(code)(torch.randn(3, 8), torch.randn(3, 8))
        assert got.stride() == (1, 8)

    def test_autocast_leaves_the_graph_alone_and_says_so(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (outcome,) = ran(Gate(), torch.randn(3, 8))
        assert taken(outcome) == {}
        (rejection,) = outcome.rejections
        assert "autocast is on around it" in rejection.reason

    def test_autocast_that_is_off_leaves_it_open(self) -> None:
        def code(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return F.silu(x) * y

        (outcome,) = ran(code, torch.randn(3, 8), torch.randn(3, 8))
        assert taken(outcome) == {"silu_mul": 1}

    def test_gradients_are_the_originals(self) -> None:
        module, x = Gate(), torch.randn(3, 8)
        grads = []
        for run in (module, compiled(module)):
            module.zero_grad()
            run(x).sum().backward()
            grads.append([p.grad.clone() for p in module.parameters()])
        torch.testing.assert_close(grads[1], grads[0])


class TestReports:
    def test_the_last_one_is_public(self) -> None:
        ran(Gate(), torch.randn(3, 8))
        assert tilegym_fx.last_report() is recent_reports()[-1]
        assert taken(tilegym_fx.last_report()) == {"linear": 2, "silu_mul": 1}

    def test_a_graph_from_the_cache_is_not_reported_twice(self) -> None:
        rewritten = compiled(Gate())
        with torch.no_grad():
            for _ in range(3):
                rewritten(torch.randn(3, 8))
        assert len(recent_reports()) == 1


def clone(x: torch.Tensor) -> Any:
    return x.clone()


def times_one(x: torch.Tensor) -> Any:
    return x * 1, x


def there_and_back(x: torch.Tensor) -> Any:
    return x.double().float()


def the_same_twice(x: torch.Tensor) -> Any:
    return x + 1, x + 1


def two_constants(x: torch.Tensor) -> Any:
    return torch.zeros(4), torch.zeros(4)


def view_of_a_copy(x: torch.Tensor) -> Any:
    return x.clone().view(2, 2), x


@pytest.mark.parametrize("function", [clone, times_one, there_and_back, the_same_twice, two_constants, view_of_a_copy])
def test_what_the_caller_gets_is_his_to_write(function: Any) -> None:
    def after_a_write(f: Any) -> list[list[float]]:
        x = torch.arange(4.0)
        found = f(x)
        results = found if isinstance(found, tuple) else (found,)
        results[0].add_(7)
        return [x.tolist(), *(r.flatten().tolist() for r in results)]

    fresh_compiler()
    compiled = torch.compile(function, backend="tilegym_fx", options={"inner": "eager"})
    assert after_a_write(compiled) == after_a_write(function)


def test_a_view_stays_a_view() -> None:
    fresh_compiler()
    compiled = torch.compile(lambda x: x.view(2, 2), backend="tilegym_fx", options={"inner": "eager"})
    x = torch.arange(4.0)
    compiled(x).add_(7)
    assert x.tolist() == [7.0, 8.0, 9.0, 10.0]
