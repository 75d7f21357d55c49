"""The matcher against code that is out to fool it: writes, other readers, modes, odd inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import (
    BATCH,
    BF16,
    FP32,
    INVENTORY,
    LENGTH,
    capture,
    check_pass,
    counts,
    find_in,
    rand,
    reasons_in,
)

from tilegym_fx.match import Matcher
from tilegym_fx.normalize import normalize
from tilegym_fx.pattern import Form, FormPatterns, patterns_of
from tilegym_fx.results import Match, Rejection, Site
from tilegym_fx.rewrite import rewrite

Code = Callable[..., Any]
EPS = blocks.EPS
NORM = {"rms_norm": 1}


def norm_inputs() -> list[torch.Tensor]:
    return [rand(5, 64), rand(64)]


def matched(code: Code, inputs: list[Any], *names: str) -> tuple[list[Match], list[Rejection]]:
    """Matches and Rejections of a few Definitions, without a plan."""
    patterns = [pattern for name in names for pattern in patterns_of(INVENTORY, name)]
    graph = capture(code, inputs).graph
    normalize(graph)
    return Matcher(INVENTORY.definitions, patterns).match(graph, lambda node: Site(node.name))


class TestWrites:
    """In-place writes to what a region reads or computes."""

    def test_before_the_region_are_no_matter(self) -> None:
        def code(x: Any, w: Any) -> Any:
            x.mul_(2)
            return blocks.rms_norm(x, w)

        check_pass(code, norm_inputs(), NORM, left=1)

    def test_after_the_region_are_no_matter(self) -> None:
        def code(x: Any, w: Any) -> Any:
            y = blocks.rms_norm(x, w)
            x.mul_(2)
            return y, x + 1

        check_pass(code, norm_inputs(), NORM, left=2)

    def test_to_an_input_between_its_reads_refuse(self) -> None:
        def code(x: Any, w: Any) -> Any:
            scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
            x.mul_(2)
            return w * (x.float() * scale).to(x.dtype)

        check_pass(code, norm_inputs(), {}, left=None)

    def test_to_a_weight_between_its_reads_refuse(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            w.add_(1)
            return w * (wide * scale).to(x.dtype)

        check_pass(code, norm_inputs(), {}, left=None, refused={"rms_norm": "is written in place inside the region"})

    def test_through_another_view_refuse(self) -> None:
        def code(x: Any, w: Any) -> Any:
            view = x.view(-1)
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            view.zero_()
            return w * (x.float() * scale).to(x.dtype)

        check_pass(code, norm_inputs(), {}, left=None)

    def test_to_an_inner_value_refuse(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            mean = wide.pow(2).mean(-1, keepdim=True)
            mean += 1
            return w * (wide * torch.rsqrt(mean + EPS)).to(x.dtype)

        check_pass(code, norm_inputs(), {}, left=None)

    def test_to_a_fresh_result_are_allowed(self) -> None:
        """The kernel's result is as fresh as the author's own."""

        def code(x: Any, w: Any) -> Any:
            y = blocks.rms_norm(x, w)
            y[1:] += x[1:]
            return y

        check_pass(code, norm_inputs(), NORM, left=None)

    def test_that_nobody_sees_are_none(self) -> None:
        """What is new and has no other reader may as well be added to another."""

        def code(x: Any, w: Any) -> Any:
            y = blocks.rms_norm(x, w)
            y += x
            return y

        check_pass(code, norm_inputs(), {"rms_norm_add": 1})

    def test_to_one_of_two_results_are_allowed(self) -> None:
        def code(x: Any, residual: Any, w: Any) -> Any:
            total = residual + x
            y = blocks.rms_norm(total, w)
            total.mul_(2)
            return y, total

        check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {"add_rms_norm": 1}, left=1)

    def test_to_one_of_two_results_before_the_other_is_there_refuse_where_it_was_not_copied(self) -> None:
        def code(x: Any, residual: Any, w: Any) -> Any:
            total = residual + x
            wide = total.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            total.mul_(2)
            return w * (wide * scale).to(x.dtype), total

        check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {"add_rms_norm": 1}, left=1)  # read by a cast
        same = [rand(5, 64, dtype=FP32), rand(5, 64, seed=1, dtype=FP32), rand(64, dtype=FP32)]
        check_pass(code, same, {}, left=None)

    def test_elsewhere_while_the_region_runs(self) -> None:
        """One result is copied to a buffer before the other is there; an input is written at last."""

        def code(x: Any, residual: Any, w: Any, buffer: Any) -> Any:
            total = residual + x
            buffer.copy_(total)
            seen = total * x
            y = blocks.rms_norm(total, w)
            x.add_(1)
            return y, seen

        inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64), rand(5, 64)]
        check_pass(code, inputs, {"add_rms_norm": 1}, left=3)

    def test_keep_their_order_around_a_kernel(self) -> None:
        """sin(x); x.copy_(y); add: the sine is of the old value."""

        def code(x: Any, y: Any, w: Any) -> Any:
            before = torch.sin(x)
            x.copy_(y)
            return before + blocks.rms_norm(x, w) + x

        check_pass(code, [rand(5, 64), rand(5, 64, seed=1), rand(64)], {"rms_norm_add": 1}, left=3)

    def test_to_a_cache_between_rotary_and_attention(self) -> None:
        """What a static cache does: the region reads the buffer after the write."""

        def code(q: Any, k: Any, v: Any, cache: Any, position: Any) -> Any:
            cache.index_copy_(2, position, k)
            return blocks.attention(q, cache, v)

        inputs = [
            rand(2, 4, 1, 16),
            rand(2, 2, 1, 16),
            rand(2, 2, 9, 16),
            rand(2, 2, 9, 16, seed=1),
            torch.tensor([4]),
        ]
        check_pass(code, inputs, {"gqa_attention": 1}, left=1)


class TestOtherReaders:
    """Values of a region that something else reads."""

    def test_inner_values_refuse_and_name_the_reader(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return w * (wide * scale).to(x.dtype), torch.exp(scale)

        check_pass(code, norm_inputs(), {}, left=None, refused={"rms_norm": r"also read by exp \(aten\.exp"})

    def test_results_are_free(self) -> None:
        def code(x: Any, w: Any) -> Any:
            y = blocks.rms_norm(x, w)
            return y, y.sin(), y[:1], y * y

        check_pass(code, norm_inputs(), NORM, left=3)

    def test_views_and_casts_stay_beside(self) -> None:
        def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return blocks.rotary(q, k, cos, sin), cos.unsqueeze(1).exp()

        check_pass(code, blocks.rotary_inputs(2, 5), {"rotary_embedding": 1}, left=2)

    def test_a_graph_output_may_be_any_value(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return w * normal.to(x.dtype), normal

        check_pass(code, norm_inputs(), {}, left=None, refused={"rms_norm": "also read by output"})

    def test_a_region_that_needs_its_own_result_refuses(self) -> None:
        """The residual of the norm is computed from the norm's input's sum: out of the region and back."""

        def code(x: Any, residual: Any, w: Any) -> Any:
            total = residual + x
            weight = w + total.sum()
            return blocks.rms_norm(total, weight), total

        inputs = [rand(5, 64), rand(5, 64, seed=1), rand(64)]
        refused = {"add_rms_norm": "reads the region and feeds it"}
        check_pass(code, inputs, {"rms_norm": 1}, left=3, refused=refused)

    def test_two_regions_that_would_need_each_other(self) -> None:
        """Each alone is fine; together they would wait for each other."""

        def code(a: Any, b: Any, c: Any, d: Any, w: Any) -> Any:
            one, two = a + b, c + d
            return blocks.rms_norm(one, w + two[0]), one, blocks.rms_norm(two, w - one[0]), two

        inputs = [*(rand(5, 64, seed=i) for i in range(4)), rand(64)]
        outcome = check_pass(code, inputs, {"add_rms_norm": 1, "rms_norm": 1}, left=None)
        assert any("need each other's result" in r.reason for r in outcome.rejections)


class TestNeighbours:
    """Regions side by side."""

    def test_two_that_touch(self) -> None:
        def code(x: Any, w: Any, gate: Any, up: Any) -> Any:
            x = blocks.rms_norm(x, w)
            x = F.silu(F.linear(x, gate)) * F.linear(x, up)
            return blocks.rms_norm(x, w[:48])

        inputs = [rand(5, 64), rand(64), rand(48, 64), rand(48, 64, seed=1)]
        check_pass(code, inputs, {"rms_norm": 2, "silu_mul": 1, "linear": 2}, left=1)

    def test_the_same_code_many_times(self) -> None:
        def code(x: Any, w: Any) -> Any:
            for _ in range(12):
                x = torch.tanh(blocks.rms_norm(x, w))
            return x

        check_pass(code, norm_inputs(), {"rms_norm": 12}, left=12)

    def test_one_value_through_several_of_a_kind(self) -> None:
        def code(x: Any, *weights: Any) -> Any:
            return [F.silu(F.linear(x, w)) * F.linear(x, u) for w, u in zip(weights[::2], weights[1::2], strict=True)]

        inputs = [rand(5, 64), *(rand(48, 64, seed=i) for i in range(6))]
        outcome = check_pass(code, inputs, {"silu_mul": 3, "linear": 6})
        pairs = {
            (str(p.match.inputs["gate"]), str(p.match.inputs["up"]))
            for p in outcome.chosen
            if len(p.match.inputs) == 2 and "gate" in p.match.inputs
        }
        assert len(pairs) == 3

    def test_gate_and_up_exchanged_between_two_places(self) -> None:
        def code(a: Any, b: Any) -> Any:
            return F.silu(a) * b, F.silu(b) * a

        check_pass(code, [rand(5, 48), rand(5, 48, seed=1)], {"silu_mul": 2})

    def test_gates_inside_lists(self) -> None:
        def code(a: Any, b: Any, c: Any) -> Any:
            return torch.cat([F.silu(a) * b, F.silu(b) * a, F.silu(c) * a], dim=0)

        check_pass(code, [rand(5, 48, seed=i) for i in range(3)], {"silu_mul": 3}, left=1)


class TestDtypes:
    """Rounding is part of the maths."""

    def test_every_cast_placement_is_told_apart(self) -> None:
        """Another Definition may take the float32 part of the code, never the casts around it."""
        written = {
            "rms_norm": blocks.rms_norm,
            "rms_norm_cast_last": blocks.rms_norm_cast_last,
            "rms_norm_plus_one": blocks.rms_norm_plus_one,
        }
        for name, code in written.items():
            for other in written.keys() - {name}:
                outcome = find_in(capture(code, norm_inputs()), only=[other])
                assert all(p.match.kind == "compatible" for p in outcome.chosen), (name, other)
                check_pass(code, norm_inputs(), counts(outcome), left=None, only=[other])

    @pytest.mark.parametrize("weight", [BF16, FP32, torch.float16])
    @pytest.mark.parametrize("rows", [BF16, FP32, torch.float16])
    @pytest.mark.parametrize("code", [blocks.rms_norm, blocks.rms_norm_cast_last, blocks.rms_norm_plus_one])
    def test_mixed_weights_compute_what_the_author_wrote(
        self, code: Code, rows: torch.dtype, weight: torch.dtype
    ) -> None:
        """Whatever Definition is bound, the numbers and the dtype of the result hold."""
        graph_inputs = [rand(5, 64, dtype=rows), rand(64, dtype=weight)]
        expected = counts(
            find_in(capture(code, graph_inputs), only=["rms_norm", "rms_norm_cast_last", "rms_norm_plus_one"])
        )
        check_pass(
            code,
            graph_inputs,
            expected,
            left=None,
            only=["rms_norm", "rms_norm_cast_last", "rms_norm_plus_one"],
        )

    def test_kind_is_exact_only_in_the_definitions_own_dtypes(self) -> None:
        for dtype, kind in ((BF16, "exact"), (torch.float16, "compatible"), (FP32, "compatible")):
            (match,), _ = matched(
                F.silu_and_mul if False else lambda g, u: F.silu(g) * u,
                [rand(5, 48, dtype=dtype), rand(5, 48, dtype=dtype, seed=1)],
                "silu_mul",
            )
            assert match.kind == kind


class TestShapes:
    """Sizes that are easy to get wrong."""

    @pytest.mark.parametrize("shape", [(0, 64), (1, 64), (1, 1, 64), (5, 1)], ids=str)
    def test_empty_and_single(self, shape: tuple[int, ...]) -> None:
        check_pass(blocks.rms_norm, [rand(*shape), rand(shape[-1])], NORM)

    def test_square_shapes_do_not_hide_the_dimension(self) -> None:
        """Every size is 8: only the arguments tell rows from columns."""

        def over_rows(x: Any, w: Any) -> Any:
            wide = x.float()
            return w * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPS)).to(x.dtype)

        check_pass(over_rows, [rand(8, 8), rand(8)], {}, left=None)
        check_pass(blocks.rms_norm, [rand(8, 8), rand(8)], NORM)

    def test_batch_and_heads_of_one_size(self) -> None:
        check_pass(
            blocks.rotary,
            [*(rand(4, 4, 4, 4, seed=i) for i in range(2)), *blocks.rotary_tables(4, 4, 4)],
            {"rotary_embedding": 1},
        )

    def test_symbols_that_happen_to_be_equal_are_one_size(self) -> None:
        check_pass(blocks.rms_norm, [rand(BATCH, LENGTH, 64), rand(64)], NORM, dynamic=True)

    def test_sizes_that_only_the_data_tell(self) -> None:
        def code(x: Any, gate: Any, up: Any, mask: Any) -> Any:
            rows = x[mask]
            return F.silu(F.linear(rows, gate)) * F.linear(rows, up)

        inputs = [
            rand(6, 64),
            rand(48, 64),
            rand(48, 64, seed=1),
            torch.tensor([True, False, True, True, False, True]),
        ]
        check_pass(code, inputs, {"silu_mul": 1, "linear": 2}, left=None)

    def test_sizes_of_two_selections_cannot_be_compared(self) -> None:
        def code(x: Any, y: Any, mask: Any, other: Any) -> Any:
            a, b = x[mask], y[other]
            torch._check(a.shape[0] == b.shape[0])
            return F.silu(a) * b

        mask = torch.tensor([True, False, True, True, False, True])
        graph = capture(code, [rand(6, 48), rand(6, 48, seed=1), mask, ~mask.flip(0) | mask])
        assert counts(find_in(graph)).get("silu_mul", 0) <= 1


class TestInputs:
    """What may be bound to an input."""

    def test_one_tensor_for_two_inputs(self) -> None:
        check_pass(lambda x: F.silu(x) * x, [rand(5, 48)], {"silu_mul": 1})

    def test_one_tensor_for_two_inputs_leaves_no_trace_in_later_graphs(self) -> None:
        """Traces at matched inputs are kept: the same sizes with two tensors are another place."""

        def code(x: Any, residual: Any, w: Any) -> Any:
            return residual + blocks.rms_norm(x, w)

        x, other, w = rand(3, 40), rand(3, 40, seed=1), rand(40)
        check_pass(lambda x, w: code(x, x, w), [x, w], {"rms_norm_add": 1})
        check_pass(code, [x, other, w], {"rms_norm_add": 1})

    def test_a_literal_is_no_tensor(self) -> None:
        check_pass(lambda x: F.silu(x) * 3.0, [rand(5, 48)], {}, left=2)

    def test_a_tensor_is_no_literal(self) -> None:
        def code(x: Any, w: Any, eps: Any) -> Any:
            return blocks.rms_norm(x, w, eps)

        check_pass(code, [*norm_inputs(), torch.tensor(1e-5)], {}, left=None)

    def test_a_literal_that_occurs_twice_must_be_one(self) -> None:
        patterns = patterns_of(INVENTORY, "softcap_attention_masked")
        assert all("softcap" in pattern.scalars for pattern in patterns)

        def code(q: Any, k: Any, v: Any, mask: Any, back: float = 50.0) -> Any:
            scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 50.0) * back + mask
            return torch.matmul(torch.softmax(scores, -1, dtype=FP32).to(q.dtype), v).transpose(1, 2)

        inputs = [*blocks.attention_inputs(2, 5, (4, 4)), rand(2, 1, 5, 5)]
        check_pass(code, inputs, {"softcap_attention_masked": 1})
        check_pass(lambda *values: code(*values, back=30.0), inputs, {}, left=None)

    def test_parameters_of_a_module_made_inside_the_graph(self) -> None:
        check_pass(lambda x: blocks.rms_norm(x, torch.ones(64, dtype=BF16)), [rand(5, 64)], NORM, left=1)

    def test_integers(self) -> None:
        check_pass(lambda x: x * x + 2, [torch.arange(12).view(3, 4)], {}, left=2)

    def test_no_input_at_all(self) -> None:
        check_pass(lambda: torch.ones(3), [], {}, left=1)


class TestModes:
    """Gradients and autocast switched inside the graph."""

    def test_a_region_across_grad_modes_refuses(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            with torch.no_grad():
                scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return w * (wide * scale).to(x.dtype)

        graph_module = torch.fx.experimental.proxy_tensor.make_fx(code, pre_dispatch=True)(*norm_inputs())
        normalize(graph_module.graph)
        assert any("mode changes between" in reason for reason in reasons_in(graph_module, "rms_norm"))

    def test_higher_order_operators_are_left_alone(self) -> None:
        def code(x: Any, w: Any) -> Any:
            y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
            return blocks.rms_norm(y, w)

        graph_module = capture(code, norm_inputs())
        outcome = find_in(graph_module)
        assert counts(outcome) == NORM
        rewrite(graph_module.graph, outcome.plan)
        graph_module.recompile()
        assert torch.equal(graph_module(*norm_inputs()), code(*norm_inputs()))


class TestReports:
    """What is said of places that do not fit."""

    def test_a_literal_anywhere_in_the_pattern_is_named(self) -> None:
        def code(x: Any, w: Any) -> Any:
            wide = x.float()
            return w * (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + EPS)).to(x.dtype)

        _, rejections = matched(code, [rand(8, 8), rand(8)], "rms_norm")
        reasons = [r.reason for r in rejections]
        assert "argument dim[0] of mean is -2, not -1" in reasons

    def test_reasons_are_made_only_when_read(self) -> None:
        _, rejections = matched(blocks.rms_norm_cast_last, norm_inputs(), "rms_norm")
        assert all(callable(r.why) for r in rejections)
        assert all(isinstance(r.reason, str) and r.reason for r in rejections)

    def test_the_site_is_that_of_the_place(self) -> None:
        (match,), _ = matched(blocks.rms_norm, norm_inputs(), "rms_norm")
        assert match.site.module_path in {node.name for node in match.nodes}

    def test_the_graph_is_only_read(self) -> None:
        graph = capture(blocks.rms_norm, norm_inputs()).graph
        normalize(graph)
        before = str(graph)
        Matcher(INVENTORY.definitions, patterns_of(INVENTORY, "rms_norm")).match(graph, lambda node: Site())
        assert str(graph) == before

    def test_a_function_that_divides_by_a_size_of_zero_is_no_match(self) -> None:
        def divides(hidden_states: Any) -> Any:
            return torch.tanh(hidden_states) if 8 // hidden_states.shape[0] < 9 else hidden_states

        gelu = INVENTORY.definitions["gelu"]
        matcher = Matcher({"gelu": gelu}, FormPatterns(gelu, Form("own", divides)).patterns)
        for rows, found in ((5, 1), (0, 0)):
            graph = capture(torch.tanh, [rand(rows, 64)]).graph
            normalize(graph)
            matches, _ = matcher.match(graph, lambda node: Site())
            assert len(matches) == found

    def test_a_graph_without_any_of_the_ops_is_soon_done(self) -> None:
        matches, rejections = matched(lambda x: x.sin(), [rand(5, 64)], "rms_norm", "silu_mul", "gqa_attention")
        assert (matches, rejections) == ([], [])


@pytest.mark.parametrize("layers", [16])
def test_time_grows_with_the_graph_only(layers: int) -> None:
    """Twice the layers, at most 2.2 times the time of this process, and a half for what is fixed."""

    def graph_of(count: int) -> torch.fx.Graph:
        def code(q: Any, k: Any, v: Any, cos: Any, sin: Any, w: Any) -> Any:
            for _ in range(count):
                q, k = blocks.rotary(blocks.rms_norm(q, w), blocks.rms_norm(k, w), cos, sin)
                q = torch.tanh(blocks.attention(q, k, v, causal=True)).transpose(1, 2)
            return q, k

        graph = capture(code, [*blocks.attention_inputs(2, 5, (4, 4)), *blocks.rotary_tables(2, 5, 16), rand(16)]).graph
        normalize(graph)
        return graph

    patterns = [
        p for name in ("rms_norm", "rotary_embedding", "gqa_attention_causal") for p in patterns_of(INVENTORY, name)
    ]
    matcher = Matcher(INVENTORY.definitions, patterns)
    small, large = graph_of(layers), graph_of(2 * layers)
    matcher.match(small, lambda node: Site())  # traces at these inputs are kept

    def seconds(graph: torch.fx.Graph) -> float:
        start = time.process_time()
        matches, _ = matcher.match(graph, lambda node: Site())
        assert len(matches) >= 4 * layers
        return time.process_time() - start

    ratios = [seconds(large) / seconds(small) for _ in range(5)]
    assert min(ratios) <= 2.2, ratios
