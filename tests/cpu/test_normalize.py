"""The normal form: what comes to the same looks the same, what does not stays apart; numbers never change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, capture, normal, rand
from torch.fx import Graph, Node

from tilegym_fx.errors import InternalError
from tilegym_fx.facts import facts_of
from tilegym_fx.normalize import PASSES, aliasing, normalize, pin_layouts

aten = torch.ops.aten
Code = Callable[..., Any]
X, SQUARE, ROWS = rand(4, 6, seed=1), rand(6, 6), rand(2, 4, 6)


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def targets(graph: Graph) -> list[str]:
    """Every call's op, sizes apart."""
    return [str(node.target).removeprefix("aten.") for node in calls(graph) if node.target is not aten.sym_size.int]


def shape_of(graph: Graph) -> list[Any]:
    """The graph as the matcher sees it: operations, operands by position, literals."""
    index = {node: i for i, node in enumerate(graph.nodes) if node.target is not aten.sym_size.int}
    seen = []
    for node in calls(graph):
        if node.target is aten.sym_size.int:
            continue
        facts = facts_of(node)
        operands = [index[operand] for operand in facts.operands]
        seen.append((str(facts.operation), sorted(operands) if facts.commutes else operands, str(facts.literals)))
    return seen


def _root_mean_square(x: Any, wide: torch.dtype, eps: float, weight: Any = 1, axes: Any = -1) -> Any:
    y = x.to(wide)
    return (y * torch.rsqrt(y.pow(2).mean(axes, keepdim=True) + eps) * weight).to(x.dtype)


SAME: dict[str, tuple[Code, ...]] = {
    "power of two": (lambda x: x / 8, lambda x: x * 0.125, lambda x: x.div(8.0)),
    "best in any order": (
        lambda x: torch.topk(x, 1, sorted=False)[0],
        lambda x: torch.topk(x, k=1, dim=1)[0],
        lambda x: x.topk(1, -1, True, False).values,
    ),
    "square": (lambda x: x * x, lambda x: x**2, torch.square, lambda x: x.pow(2.0), lambda x: x.square()),
    "inverse root": (
        torch.rsqrt,
        lambda x: x**-0.5,
        lambda x: 1 / torch.sqrt(x),
        lambda x: x.sqrt().reciprocal(),
    ),
    "number on either side": (
        lambda x: 2 * x + 3,
        lambda x: 3 + x * 2,
        lambda x: torch.add(3, torch.mul(x, 2)),
    ),
    "counted from a number": (
        lambda x: x + torch.arange(3, 9),
        lambda x: x + (torch.arange(6) + 3),
        lambda x: x + (torch.arange(1, 7) + 2),
        lambda x: x + (2 + torch.arange(6) + 1),
    ),
    "difference from a number": (lambda x: 1 - x, lambda x: torch.rsub(x, 1)),
    "identities": (lambda x: x.sin(), lambda x: ((x * 1) / 1 + 0 - 0).sin(), lambda x: (1.0 * x).sin()),
    "no-op casts": (torch.sin, lambda x: x.to(x.dtype).sin(), lambda x: x.type_as(x).to(x.device).sin()),
    "casts": (lambda x: x.to(FP32), lambda x: x.float(), lambda x: x.type(FP32), lambda x: x.to(dtype=FP32)),
    "round trips": (torch.sin, lambda x: x.float().to(BF16).sin(), lambda x: x.double().to(BF16).sin()),
    "promotion": (lambda x: x.float() * x.float().sin(), lambda x: x * x.float().sin()),
    "copies": (torch.sin, lambda x: x.clone().contiguous().sin()),
    "detached integers": (lambda x: x.argmax(-1) + 1, lambda x: x.argmax(-1).detach() + 1),
    "dropout": (
        torch.sin,
        lambda x: F.dropout(x, 0.5, training=False).sin(),
        lambda x: F.dropout(x, 0.0).sin(),
    ),
    "softmax": (lambda x: x.softmax(-1), lambda x: torch.softmax(x, dim=1), lambda x: F.softmax(x, dim=-1)),
    "mean": (
        lambda x: x.mean(-1, keepdim=True),
        lambda x: torch.mean(x, dim=[1], keepdim=True),
        lambda x: x.mean(dim=-1).unsqueeze(1),
    )[:2],
    "root mean square": (
        lambda x: F.rms_norm(x, (6,), x[0]),
        lambda x: F.rms_norm(x, [6], weight=x[0], eps=None),
        lambda x: F.rms_norm(x, x.shape[-1:], x[0], torch.finfo(FP32).eps),
        lambda x: _root_mean_square(x, FP32, torch.finfo(FP32).eps, x[0]),
    ),
    "root mean square without a weight": (
        lambda x: F.rms_norm(x, (6,), eps=1e-5),
        lambda x: _root_mean_square(x, FP32, 1e-5),
    ),
    "transpose": (
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.swapaxes(-1, 0),
    ),
    "order of dimensions": (
        lambda x: x[None, None].permute(0, 3, 1, 2).sin(),
        lambda x: x[None, None].permute(0, -1, 1, -2).sin(),
    ),
    "padding": (
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (1, 2), mode="constant", value=0),
        lambda x: F.pad(x, (1, 2), value=0.0),
        lambda x: torch.constant_pad_nd(x, (1, 2)),
        lambda x: F.pad(F.pad(x, (0, 0, 0, 0)), (1, 2)),
    ),
    "two transposes": (
        lambda x: x.view(2, 2, 6).transpose(0, 1).transpose(-1, -2),
        lambda x: x.view(2, 2, 6).permute(1, 2, 0),
    ),
    "numbers that are filled in": (
        lambda x: torch.where(x > 1, x, 0.5).masked_fill(x == 2, 0.25),
        lambda x: torch.where(x > 1, x, torch.full((), 0.5, dtype=x.dtype)).masked_fill(
            x == 2, torch.scalar_tensor(0.25)
        ),
    ),
    "no transpose": (torch.sin, lambda x: x.t().transpose(0, 1).sin()),
    "reshape": (
        lambda x: x.reshape(2, 12).sin(),
        lambda x: x.view(2, -1).sin(),
        lambda x: x.reshape(24).view(2, 12).sin(),
        lambda x: x.flatten().unflatten(0, (2, 12)).sin(),
        lambda x: x.unsqueeze(0).squeeze().view_as(torch.empty(2, 12)).sin(),
    ),
    "slices": (
        lambda x: torch.dot(*(part.flatten() for part in (x[:, :3], x[:, 3:]))),
        lambda x: torch.dot(*(part.flatten() for part in x.chunk(2, 1))),
        lambda x: torch.dot(*(part.flatten() for part in x.split([3, 3], dim=-1))),
        lambda x: torch.dot(*(part.flatten() for part in (x.narrow(1, 0, 3), x.narrow(-1, 3, 3)))),
        lambda x: torch.dot(*(part.flatten() for part in (x[:, 0:-3:1], x[:, -3:]))),
    ),
    "select": (lambda x: x[1].sin(), lambda x: x.unbind()[1].sin(), lambda x: x.select(0, -3).sin()),
    "expand": (
        lambda x: x[:, None].expand(4, 2, 6).sin(),
        lambda x: x[:, None].expand(-1, 2, -1).sin(),
        lambda x: x[:, None].broadcast_to(4, 2, 6).sin(),
    ),
    "duplicates": (lambda x: (y := x.sin()) + y.cos(), lambda x: x.sin() + x.sin().cos()),
    "default arguments": (
        lambda x: F.gelu(x) + torch.softmax(x, 1),
        lambda x: F.gelu(x, approximate="none") + torch.softmax(x, dim=1, dtype=None),
    ),
    "silu": (F.silu, torch.nn.SiLU(), lambda x: torch.nn.functional.silu(input=x)),
}


@pytest.mark.parametrize("name", SAME)
def test_one_form(name: str) -> None:
    first, *others = (shape_of(normal(code, [X.abs() + 0.5])) for code in SAME[name])
    for number, other in enumerate(others, 1):
        assert other == first, f"writing {number} of {name}"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x**2, lambda x: x**3),
        (lambda x: x / x.abs().sqrt(), lambda x: x * x.abs().rsqrt()),
        (lambda x: x.float() * 2, lambda x: (x * 2).float()),
        (lambda x: x.to(torch.float16).to(BF16), lambda x: x * 1),
        (lambda x: x - 1, lambda x: 1 - x),
        (lambda x: x + (torch.arange(6) + 3), lambda x: x + (torch.arange(6.0) + 3)),
        (lambda x: x + (torch.arange(6) + 3), lambda x: x + (torch.arange(6) + 3.0)),
        (lambda x: x + (torch.arange(0, 12, 2) + 3), lambda x: x + torch.arange(3, 9)),
        (lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(x, x)),
        (lambda x: x.softmax(0), lambda x: x.softmax(1)),
        (lambda x: x[:, :2], lambda x: x[:, 1:3]),
        (lambda x: x.mean(-1), lambda x: x.mean(-1, keepdim=True)),
        (lambda x: x.view(2, 2, 6).permute(1, 2, 0), lambda x: x.view(2, 2, 6).permute(2, 0, 1)),
        (lambda x: torch.where(x > 1, x, 0.5), lambda x: torch.where(x > 1, x, torch.full((1,), 0.5, dtype=FP32))),
        (lambda x: torch.where(x > 1, x, 0.5), lambda x: torch.where(x > 1, torch.full((), 0.5, dtype=BF16), x)),
        (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
        (lambda x: x * True, lambda x: x * 1.5),
        (lambda x: x.reshape(2, 12), lambda x: x.reshape(12, 2)),
        (lambda x: x.t().reshape(2, 12), lambda x: x.reshape(2, 12)),
        (lambda x: F.rms_norm(x, (6,)), lambda x: F.rms_norm(x, (6,), eps=torch.finfo(BF16).eps)),
        (lambda x: F.rms_norm(x, (6,)), lambda x: F.rms_norm(x, (4, 6))),
        (lambda x: F.rms_norm(x, (6,), x[0]), lambda x: F.rms_norm(x, (6,)) * x[0]),
        (lambda x: torch.rsub(x, x, alpha=3), lambda x: x - x),
        (lambda x: x.square(), lambda x: x.float().square().to(BF16)),
        (lambda x: x.sin(), lambda x: x.detach().sin()),
        (lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (1, 2), value=1)),
        (lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (1, 2), mode="reflect")),
        (lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (2, 1))),
        (lambda x: x[None].permute(0, 2, 1), lambda x: x[None].permute(1, 2, 0)),
    ],
)
def test_what_differs_stays_apart(one: Code, two: Code) -> None:
    assert shape_of(normal(one, [X])) != shape_of(normal(two, [X]))


@pytest.mark.parametrize(
    "code",
    [
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: torch.sub(x, y, alpha=3),
        lambda x, y: torch.rsub(x, y, alpha=3),
        lambda x, y: torch.ops.aten.add.Scalar(x, 2, 3) * y,
        lambda x, y: torch.ops.aten.rsub.Scalar(x, 2, 3) * y,
    ],
)
def test_factors_of_a_sum_are_kept(code: Code) -> None:
    normal(code, [X, rand(4, 6, seed=2)])


@pytest.mark.parametrize("weight", [None, BF16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, torch.float64], ids=str)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_root_mean_square_norm_keeps_every_bit(dtype: torch.dtype, eps: float | None, weight: Any) -> None:
    """On rows so small that eps decides; the sizes of the rows may be read off the value."""
    x = (1e-4 * rand(BATCH, LENGTH, 4, 6)).to(dtype)
    w = None if weight is None else rand(4, 6, dtype=weight)
    for axes in (1, 2):

        def code(x: Any, w: Any = None, axes: int = axes) -> Any:
            return F.rms_norm(x, x.shape[-axes:], None if w is None else w[-1] if axes == 1 else w, eps)

        for dynamic in (False, True):
            inputs = [x] if w is None else [x, w]
            graph_module = capture(code, inputs, dynamic=dynamic)
            normalize(graph_module.graph)
            graph_module.recompile()
            assert "rms_norm.default" not in targets(graph_module.graph)
            assert torch.equal(graph_module(*inputs), code(*inputs))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
def test_other_dtypes_keep_their_values(dtype: torch.dtype) -> None:
    value = (10 * X).to(dtype)
    normal(lambda x: (x * 1, x * x, x.float().to(x.dtype), x.to(torch.int32).to(x.dtype), x + x), [value])


def test_one_times_an_integer_may_be_another_dtype() -> None:
    graph = normal(lambda x: x * 1.0, [torch.arange(6)])
    assert targets(graph) == ["mul.Tensor"]


@pytest.mark.parametrize(
    "code",
    [
        lambda x, w: torch.matmul(x, w),
        lambda x, w: torch.matmul(x, w.t()),
        lambda x, w: x @ w.transpose(0, 1),
        lambda x, w: F.linear(x, w),
    ],
)
@pytest.mark.parametrize("rows", [X, ROWS], ids=["2-D", "3-D"])
def test_products_with_a_weight_are_linear(code: Code, rows: torch.Tensor) -> None:
    graph = normal(code, [rows, SQUARE])
    assert set(targets(graph)) - {"transpose.int"} == {"linear.default"}


def test_addmm_is_linear_of_unflattened_rows() -> None:
    def conv1d(x: Any, w: Any, b: Any) -> Any:
        return torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.shape[:-1], w.shape[1])

    for dynamic in (False, True):
        graph = normal(conv1d, [rand(BATCH, LENGTH, 6), SQUARE, rand(6)], dynamic=dynamic)
        assert targets(graph) == ["transpose.int", "linear.default"]


def test_near_miss_heads_put_together_for_a_linear_are_no_flattened_rows() -> None:
    def code(x: Any, w: Any) -> Any:
        return F.linear(x.flatten(-2), w).view(x.shape)

    graph = normal(code, [rand(2, 3, 6), rand(18, 18)])
    assert targets(graph) == ["reshape.default", "linear.default", "reshape.default"]


def test_addmm_with_factors_stays() -> None:
    graph = normal(lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=0.5), [rand(6), X, SQUARE])
    assert targets(graph) == ["addmm.default"]


def test_products_of_activations_stay() -> None:
    graph = normal(lambda q, k: q.sin() @ k.sin().transpose(-1, -2), [ROWS, ROWS])
    assert "matmul.default" in targets(graph)


def test_the_scale_of_attention_is_written_down() -> None:
    q = rand(2, 2, 5, 16)
    one = normal(lambda q: F.scaled_dot_product_attention(q, q, q), [q])
    two = normal(lambda q: F.scaled_dot_product_attention(q, q, q, scale=0.25), [q])
    assert shape_of(one) == shape_of(two)
    assert shape_of(one) != shape_of(normal(lambda q: F.scaled_dot_product_attention(q, q, q, scale=0.5), [q]))


def test_a_factor_of_queries_stands_next_to_the_attention() -> None:
    def early(rows: Any, k: Any) -> Any:
        q = (rows * 0.25).view(2, 5, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, scale=1.0)

    def late(rows: Any, k: Any) -> Any:
        q = rows.view(2, 5, 4, 8).transpose(1, 2) * 0.25
        return F.scaled_dot_product_attention(q, k, k, scale=1.0)

    inputs = [rand(2, 5, 32), rand(2, 4, 5, 8)]
    assert shape_of(normal(early, inputs)) == shape_of(normal(late, inputs))


def _read_besides(rows: Any, k: Any) -> Any:
    scaled = rows * 0.25
    return F.scaled_dot_product_attention(scaled.view(2, 5, 4, 8).transpose(1, 2), k, k, scale=1.0), scaled


def _written_between(rows: Any, k: Any) -> Any:
    scaled = rows * 0.25
    rows.add_(1)
    return F.scaled_dot_product_attention(scaled.view(2, 5, 4, 8).transpose(1, 2), k, k, scale=1.0)


def _factor_of_each_column(rows: Any, k: Any) -> Any:
    scaled = rows * rows[:1, :1]
    return F.scaled_dot_product_attention(scaled.view(2, 5, 4, 8).transpose(1, 2), k, k, scale=1.0)


@pytest.mark.parametrize("code", [_read_besides, _written_between, _factor_of_each_column])
def test_other_factors_stay_where_they_are(code: Code) -> None:
    order = targets(normal(code, [rand(2, 5, 32), rand(2, 4, 5, 8)]))
    assert order.index("mul.Tensor") < order.index("reshape.default")


def test_random_calls_are_neither_merged_nor_dropped() -> None:
    graph_module = capture(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), [X])
    normalize(graph_module.graph)
    assert targets(graph_module.graph) == ["dropout.default", "dropout.default", "add.Tensor"]


def test_asserts_on_tensors_go() -> None:
    def code(x: Any) -> Any:
        torch.ops.aten._assert_tensor_metadata.default(x, dtype=BF16)
        return x.sin()

    graph = capture(code, [X]).graph
    normalize(graph)
    assert targets(graph) == ["sin.default"]


@pytest.mark.parametrize(
    "code",
    [
        lambda x: ((y := x * 2).clone(), y.clone()),
        lambda x: ((y := x * 2) * 1, y + 0),
        lambda x: ((y := x * 2).clone().view(-1), y.clone()[1:]),
        lambda x: ((y := x * 2).clone(), y.clone().t(), (y * 1).view(-1)),
        lambda x: ((y := x * 2).clone().view(-1).clone(), y.clone()),
    ],
)
def test_equal_values_that_the_caller_gets_stay_apart(code: Code) -> None:
    """Whatever the first of them has become."""
    graph_module = capture(code, [X])
    pin_layouts(graph_module.graph)
    normalize(graph_module.graph)
    graph_module.recompile()
    memory = [value.untyped_storage().data_ptr() for value in graph_module(X)]
    assert len(set(memory)) == len(memory)


def test_two_runs_change_nothing_more() -> None:
    def code(x: Any) -> Any:
        left, right = x.float().chunk(2, -1)
        return torch.cat((-right, left), 1).pow(2).mean(1, True).add(1e-6).rsqrt().to(BF16) * x

    graph_module = capture(code, [X])
    assert normalize(graph_module.graph) > 0
    before = shape_of(graph_module.graph)
    assert normalize(graph_module.graph) == 0
    assert shape_of(graph_module.graph) == before


class TestWrites:
    """Values that share memory with something that is written in place."""

    def test_where_nothing_is_written_memory_is_not_followed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def follow(node: Node) -> list[Node]:
            raise AssertionError(f"the memory of {node} was asked for")

        monkeypatch.setattr(aliasing, "_aliased_args", follow)
        for is_written in (False, True):
            graph = capture(lambda x, is_written=is_written: x.sin().neg_() if is_written else x.sin().neg(), [X]).graph
            with pytest.raises(AssertionError) if is_written else nullcontext():
                writes = aliasing.Writes(graph)
                assert not any(map(writes.touched, graph.nodes))
                assert not writes

    @pytest.mark.parametrize(
        "code",
        [
            lambda x: ((y := x.clone()).add_(1), x, y),
            lambda x: ((y := x * 1).add_(1), x + 0),
            lambda x: ((y := x.to(BF16, copy=True)).mul_(2), x.sin()),
            lambda x: ((y := x.float().to(BF16)).mul_(2), x.sin()),
            lambda x: (x.sin(), x.add_(1).sin()),
            lambda x: ((y := x.view(-1)), x.add_(1), y.sin()),
            lambda x: ((y := x.contiguous()), x.add_(1), y.sin()),
            lambda x: ((y := x.t()[1:]), x.zero_(), y.sin()),
            lambda x: ((y := x.clone()), x.zero_(), y.sin()),
            lambda x: (x.chunk(2, 1)[0].add_(1), x.chunk(2, 1)[0] * 2),
            lambda x: ((y := F.dropout(x, 0.5, False)), x.zero_(), y.sin()),
            lambda x: ((y := torch.einsum("ij->ji", x)), x.zero_(), y.sin()),
            lambda x: (torch.broadcast_tensors(x, x)[0].sin(), x.zero_(), x.sin()),
            lambda x: ((y := (1 / torch.sqrt(x.abs() + 1)) * 1).add_(3), torch.rsqrt(x.abs() + 1)),
        ],
    )
    def test_keep_their_time_and_place(self, code: Code) -> None:
        normal(code, [X])

    def test_of_an_output_reach_no_input(self) -> None:
        """What the caller gets as a copy stays one: he may write it."""
        for code in (
            torch.clone,
            lambda x: x * 1,
            lambda x: x.float().to(BF16),
            lambda x: x.to(BF16, copy=True),
        ):
            graph_module = capture(code, [X])
            normalize(graph_module.graph)
            graph_module.recompile()
            x = X.clone()
            graph_module(x).zero_()
            assert torch.equal(x, X)

    def test_of_one_output_reach_no_other(self) -> None:
        graph_module = capture(lambda x: (x.sin(), x.sin()), [X])
        normalize(graph_module.graph)
        graph_module.recompile()
        one, two = graph_module(X.clone())
        one.zero_()
        assert torch.equal(two, X.sin())


class TestOrigins:
    """`meta["origins"]`: which exported values a node has."""

    def test_of_values_that_became_one(self) -> None:
        graph_module = capture(lambda x: x.sin() + x.to(BF16).sin().clone(), [X])
        names = {node.name for node in graph_module.graph.nodes if node.op == "call_function"}
        normalize(graph_module.graph)
        (sine, total) = calls(graph_module.graph)
        assert set(sine.meta["origins"]) == names - {"add", "to", *(n for n in names if n.startswith("to"))}
        assert total.meta["origins"] == ("add",)

    def test_of_new_values_are_none(self) -> None:
        graph = normal(lambda x: x * x.float(), [X])
        (cast,) = graph.find_nodes(op="call_function", target=aten.to.dtype)
        assert len(cast.meta["origins"]) == 1  # the author's own; the promoted one is the same value


class TestSizes:
    """Symbolic sizes."""

    def test_are_read_from_the_first_value_that_has_them(self) -> None:
        def code(x: Any) -> Any:
            y = x.sin()
            return y.view(y.shape[0], -1) * y.shape[1]

        graph = normal(code, [rand(BATCH, LENGTH, 6)], dynamic=True)
        inputs = graph.find_nodes(op="placeholder")
        sizes = graph.find_nodes(op="call_function", target=aten.sym_size.int)
        assert {node.args[0] for node in sizes} <= set(inputs)

    def test_of_views_need_no_guard(self) -> None:
        graph_module = capture(
            lambda x: x.view(-1, 6).view(BATCH, -1, 6).flatten(0, 1), [rand(BATCH, LENGTH, 6)], dynamic=True
        )
        shape_env = next(n.meta["val"] for n in graph_module.graph.nodes).fake_mode.shape_env
        guards = len(shape_env.guards)
        normalize(graph_module.graph)
        assert len(shape_env.guards) == guards


class TestLayouts:
    """Strides that somebody sees are kept by pins."""

    @pytest.mark.parametrize(
        "code",
        [
            lambda x: x.t().contiguous() * 2,
            lambda x: x.t().contiguous().sin(),
            lambda x: (x.t().clone(memory_format=torch.contiguous_format) + 1, x),
        ],
    )
    def test_of_outputs(self, code: Code) -> None:
        graph_module = capture(code, [X])
        pin_layouts(graph_module.graph)
        normalize(graph_module.graph)
        graph_module.recompile()
        got, want = graph_module(X), code(X)
        for a, b in zip(
            got if isinstance(got, tuple) else (got,),
            want if isinstance(want, tuple) else (want,),
            strict=True,
        ):
            assert a.stride() == b.stride()

    def test_of_what_other_code_reads(self) -> None:
        seen = []

        @torch.library.custom_op("tilegym_fx_test::look", mutates_args=())
        def look(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.stride())
            return x.clone()

        look.register_fake(torch.empty_like)
        graph_module = capture(lambda x: look(x.t().contiguous().sin()), [X])
        pin_layouts(graph_module.graph)
        normalize(graph_module.graph)
        graph_module.recompile()
        graph_module(X)
        assert seen == [(4, 1)]

    def test_that_nobody_sees_are_free(self) -> None:
        assert targets(normal(lambda x: x.t().contiguous().sin().sum(), [X])) == [
            "transpose.int",
            "sin.default",
            "sum.default",
        ]

    def test_of_what_is_not_contiguous_need_no_pin(self) -> None:
        graph_module = capture(lambda x: x.t(), [X])
        assert pin_layouts(graph_module.graph) == 0


def test_grad_mode_keeps_equal_calls_apart() -> None:
    def code(x: Any) -> Any:
        with torch.no_grad():
            y = x.sin()
        return y + x.sin()

    graph_module = torch.fx.experimental.proxy_tensor.make_fx(code, pre_dispatch=True)(X)
    normalize(graph_module.graph)
    assert targets(graph_module.graph).count("sin.default") == 2


def test_passes_have_names_and_say_what_they_do() -> None:
    names = [graph_pass.__name__ for graph_pass in PASSES]
    assert len(set(names)) == len(names)
    assert all(graph_pass.__doc__ for graph_pass in PASSES)


def test_a_graph_without_values_is_refused_by_the_entry_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_CHECK", "1")
    graph = Graph()
    graph.output(graph.call_function(aten.sin.default, (graph.placeholder("x"),)))
    with pytest.raises(InternalError, match="on entry, node sin_default"):
        normalize(graph)


def test_a_pass_that_breaks_the_normal_form_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_CHECK", "1")
    monkeypatch.setattr("tilegym_fx.normalize.PASSES", ())
    with pytest.raises(InternalError, match=r"aten\.square.* should not be in the normal form"):
        normalize(capture(lambda x: x.square().sin(), [X]).graph)
