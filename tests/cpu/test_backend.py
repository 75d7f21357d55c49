"""torch.compile(backend="tilegym_fx"): options, reports, modes, gradients, writes, graph breaks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import rand
from torch import nn

import tilegym_fx
from tilegym_fx.reports import last_report, recent_reports

Code = Callable[..., Any]
ONLY = ["rms_norm", "add_rms_norm", "silu_mul", "linear", "linear_bias"]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(code: Code, *, dynamic: bool | None = False, inner: str = "eager", **options: Any) -> Any:
    return torch.compile(
        code, backend="tilegym_fx", dynamic=dynamic, options={"inner": inner, "only": ONLY, **options}
    )


def counts() -> dict[str, int]:
    report = last_report()
    assert report is not None
    return dict(Counter(p.match.definition for p in report.chosen))


def norm(x: Any, w: Any) -> Any:
    return blocks.rms_norm(x, w)


def test_the_entry_point_is_known_to_torch() -> None:
    assert "tilegym_fx" in torch._dynamo.list_backends()


def test_the_report_is_reachable_from_the_package() -> None:
    compiled(norm)(rand(5, 64), rand(64))
    assert tilegym_fx.last_report() is last_report()
    assert counts() == {"rms_norm": 1}
    assert set(last_report().seconds) == {"normalize", "match", "plan"}
    assert 0 < last_report().coverage <= 1


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_numbers_are_those_of_the_original(inner: str) -> None:
    inputs = [rand(5, 64), rand(64)]
    torch.testing.assert_close(compiled(norm, inner=inner)(*inputs), norm(*inputs))


def test_skip() -> None:
    compiled(norm, skip=["rms_norm"])(rand(5, 64), rand(64))
    assert counts() == {}
    assert any(r.reason == "left out by only= or skip=" for r in last_report().rejections)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "outer"}, r"inner='outer' is no inner compiler.*inductor, eager"),
        ({"only": ["rms_nrom"]}, r"only= names 'rms_nrom', which is no Definition"),
        ({"triton.cudagraphs": True}, r"inner='eager' takes no 'triton.cudagraphs'"),
        ({"inner": "inductor", "no_such_option": 1}, "no_such_option"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(norm, **options)(rand(5, 64), rand(64))


def test_mode_reaches_inductor() -> None:
    inputs = [rand(5, 64), rand(64)]
    fast = torch.compile(norm, backend="tilegym_fx", mode="reduce-overhead", dynamic=False)
    torch.testing.assert_close(fast(*inputs), norm(*inputs))


def test_one_dynamic_graph_serves_other_sizes() -> None:
    before = len(recent_reports())
    fast = compiled(norm, dynamic=True)
    for rows in (5, 9, 17):
        inputs = [rand(2, rows, 64), rand(64)]
        torch.testing.assert_close(fast(*inputs), norm(*inputs))
    assert len(recent_reports()) == before + 1


def test_a_graph_break_makes_two_reports() -> None:
    def code(x: Any, w: Any) -> Any:
        x = norm(x, w)
        torch._dynamo.graph_break()
        return norm(x, w)

    before = len(recent_reports())
    inputs = [rand(5, 64), rand(64)]
    torch.testing.assert_close(compiled(code)(*inputs), code(*inputs))
    assert [len(r.chosen) for r in recent_reports()[before:]] == [1, 1]


def test_layout_of_results_is_that_of_the_author() -> None:
    def code(x: Any, w: Any) -> Any:
        return norm(x, w).transpose(0, 1).contiguous() * 2

    inputs = [rand(5, 64), rand(64)]
    got = compiled(code)(*inputs)
    assert got.stride() == code(*inputs).stride()
    got.view(-1)


def test_inputs_written_in_place_are_written() -> None:
    def code(x: Any, w: Any) -> Any:
        y = norm(x, w)
        x.mul_(2)
        return y + x

    x, w = rand(5, 64), rand(64)
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(compiled(code)(mine, w), code(theirs, w))
    assert torch.equal(mine, theirs)


def test_conditional_subgraphs_are_left_alone() -> None:
    def code(x: Any, w: Any) -> Any:
        x = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
        return norm(x, w)

    inputs = [rand(5, 64), rand(64)]
    torch.testing.assert_close(compiled(code)(*inputs), code(*inputs))
    assert counts() == {"rms_norm": 1}


class TestAutocast:
    """Autocast chooses dtypes below the level of the graph: such a graph is left as it is, and says so."""

    def check(self, code: Code, caplog: pytest.LogCaptureFixture, message: str) -> None:
        inputs = [rand(5, 64, dtype=torch.float32), rand(48, 64, dtype=torch.float32)]
        with caplog.at_level(logging.WARNING, "tilegym_fx"):
            got = compiled(code)(*inputs)
        want = code(*inputs)
        assert got.dtype == want.dtype == torch.bfloat16
        assert torch.equal(got, want)
        assert counts() == {}
        assert message in last_report().rejections[0].reason
        assert message in caplog.text

    def test_inside(self, caplog: pytest.LogCaptureFixture) -> None:
        def code(x: Any, w: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return F.linear(x, w)

        self.check(code, caplog, "it turns autocast on")

    def test_around(self, caplog: pytest.LogCaptureFixture) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.check(F.linear, caplog, "autocast is on around it")

    def test_turned_off_inside_is_no_matter(self) -> None:
        def code(x: Any, w: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return F.linear(x, w)

        compiled(code)(rand(5, 64), rand(48, 64))
        assert counts() == {"linear": 1}


class TestGradients:
    """Training through the rewritten graph."""

    @pytest.mark.parametrize("inner", ["eager", "inductor"])
    def test_are_those_of_the_original(self, inner: str) -> None:
        def mlp(x: Any, w: Any, gate: Any, up: Any) -> Any:
            x = norm(x, w)
            return (F.silu(F.linear(x, gate)) * F.linear(x, up)).square().sum()

        shapes = ((5, 64), (64,), (48, 64), (48, 64))
        found = []
        for run in (mlp, compiled(mlp, inner=inner)):
            leaves = [rand(*s, dtype=torch.float32, seed=i).requires_grad_() for i, s in enumerate(shapes)]
            found.append(torch.autograd.grad(run(*leaves), leaves))
        assert counts() == {"rms_norm": 1, "silu_mul": 1, "linear": 2}
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_stop_where_the_author_stops_them(self) -> None:
        """The statistics of the norm are detached: taking the region over would let gradients through."""

        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            with torch.no_grad():
                scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (w * (wide * scale).to(x.dtype)).sum()

        self.check_stopped(code)

    def test_stop_at_detach(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            scale = torch.rsqrt(wide.detach().pow(2).mean(-1, keepdim=True) + 1e-5)
            return (w * (wide * scale).to(x.dtype)).sum()

        self.check_stopped(code)

    def check_stopped(self, code: Code) -> None:
        found = []
        for run in (code, compiled(code)):
            leaves = [rand(5, 64, dtype=torch.float32).requires_grad_(), rand(64, dtype=torch.float32).requires_grad_()]
            found.append(torch.autograd.grad(run(*leaves), leaves))
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want)

    def test_flow_through_a_module_and_its_optimizer(self) -> None:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        runs = models[0], compiled(models[1])
        for model, run in zip(models, runs, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                run(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
        for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(one, two)


def test_dropout_in_training_stays_random() -> None:
    def code(x: Any) -> Any:
        return F.dropout(x, 0.5, True), F.dropout(x, 0.5, True)

    torch.manual_seed(0)
    one, two = compiled(code)(torch.ones(1000))
    assert not torch.equal(one, two)


def test_a_matcher_that_meets_nothing_it_knows() -> None:
    def code(x: Any) -> Any:
        values, places = x.topk(3)
        return values.cumsum(-1), places, x.nonzero().shape[0]

    got, want = compiled(code)(rand(5, 64)), code(rand(5, 64))
    torch.testing.assert_close(got[0], want[0])
    assert counts() == {}


def test_two_compiled_functions_do_not_mix() -> None:
    other = compiled(lambda x, w: blocks.rms_norm(x, w, 1e-1))
    one = compiled(norm)
    inputs = [rand(5, 64), rand(64)]
    assert not torch.equal(one(*inputs), other(*inputs))
    torch.testing.assert_close(one(*inputs), norm(*inputs))
