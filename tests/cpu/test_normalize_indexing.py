"""Writes through an index of one number have one form; what is no such index, or may change, stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pass_checks
import pytest
import torch
from pass_checks import BATCH, capture, guards_of
from torch.fx import Graph, GraphModule

from tilegym_fx.normalize import normalize

aten = torch.ops.aten
Case = Callable[..., Any]


def normal(code: Case, *inputs: Any, dynamic: bool = False) -> Graph:
    return pass_checks.normal(code, inputs, dynamic=dynamic)


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def set_last(x: Any, y: Any) -> Any:
    out = x * 2
    out[:, :, torch.tensor([-1])] = y
    return out.exp()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(BATCH, 2), (1, 2), (1, 1), (BATCH, 1)])
def test_an_item_that_is_set_is_one_put(shape: tuple[int, int], dynamic: bool) -> None:
    graph = normal(set_last, torch.randn(*shape, 5, 4), torch.randn(*shape, 1, 4), dynamic=dynamic)
    assert targets(graph) == [aten.mul.Tensor, aten.full.default, aten.index_put.default, aten.exp.default]
    (put,), inputs = (
        graph.find_nodes(op="call_function", target=aten.index_put.default),
        graph.find_nodes(op="placeholder"),
    )
    assert put.args[2] is inputs[1]
    (number,) = graph.find_nodes(op="call_function", target=aten.full.default)
    assert number.args == ([1], -1)
    assert number.kwargs["dtype"] == torch.int64


def test_equal_constants_of_several_places_are_one_node() -> None:
    def code(x: Any, y: Any) -> Any:
        return set_last(x, y) + set_last(x + 1, y)

    assert targets(normal(code, torch.randn(2, 2, 5, 4), torch.randn(2, 2, 1, 4))).count(aten.full.default) == 1


def test_a_number_that_is_moved_to_another_device_is_made_there() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.full.default, ([1], -1), {"dtype": torch.int64, "device": torch.device("cpu")})
    moved = graph.call_function(aten._to_copy.default, (made,), {"device": torch.device("meta")})
    graph.output(graph.call_function(aten.index.Tensor, (x, [moved])))
    x.meta["val"], made.meta["val"] = torch.empty(3, 4, device="meta"), torch.full((1,), -1)
    moved.meta["val"] = torch.empty(1, dtype=torch.int64, device="meta")
    list(graph.nodes)[-2].meta["val"] = torch.empty(1, 4, device="meta")
    normalize(graph)
    (number,) = graph.find_nodes(op="call_function", target=aten.full.default)
    assert (number.args, number.kwargs["device"]) == (([1], -1), torch.device("meta"))
    assert targets(graph) == [aten.full.default, aten.index.Tensor]


def several(x: Any) -> Any:
    return x[torch.tensor([0, 2])]


def none_dimensional(x: Any) -> Any:
    return x[torch.tensor(1)] * 2


def floating(x: Any) -> Any:
    return x * torch.tensor([0.1])


@pytest.mark.parametrize("code", [several, none_dimensional, floating])
def test_other_constants_stay(code: Case) -> None:
    assert aten.full.default not in targets(normal(code, torch.randn(3, 4)))


def test_a_constant_that_is_written_stays() -> None:
    def code(x: Any) -> Any:
        place = torch.tensor([1])
        first = x[place]
        place.add_(x[0, :1].long())
        return first, x[place]

    assert aten.full.default not in targets(normal(code, torch.zeros(3, 4)))


def test_a_constant_is_read_where_it_is_held() -> None:
    """Not the first one of the process: two graphs have constants of one name."""
    for number in (-1, -2):

        def code(x: Any, number: int = number) -> Any:
            return x[torch.tensor([number])]

        (made,) = normal(code, torch.randn(3, 4)).find_nodes(op="call_function", target=aten.full.default)
        assert made.args == ([1], number)


def input_is_written(x: Any, y: Any) -> Any:
    x[:, :, torch.tensor([-1])] = y
    return x.exp()


def a_view_of_it_is_read(x: Any, y: Any) -> Any:
    out = x * 2
    seen = out[:, :1]
    out[:, :, torch.tensor([-1])] = y
    return seen.exp()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("code", [input_is_written, a_view_of_it_is_read])
def test_what_is_seen_is_written(code: Case, dynamic: bool) -> None:
    graph = normal(code, torch.randn(BATCH, 2, 5, 4), torch.randn(BATCH, 2, 1, 4), dynamic=dynamic)
    assert aten.index_put_.default in targets(graph)


def test_a_part_of_a_value_is_written_where_it_is() -> None:
    def code(x: Any, y: Any) -> Any:
        out = x * 2
        out[1:, :, torch.tensor([-1])] = y
        return out.exp()

    graph = normal(code, torch.randn(3, 2, 5, 4), torch.randn(2, 2, 1, 4))
    assert aten.index_put_.default in targets(graph)


def test_what_is_reshaped_otherwise_is_put_as_it_is() -> None:
    def code(x: Any, y: Any) -> Any:
        out = x * 2
        return out.index_put((torch.tensor([0]),), y.reshape(2, 4)).exp()

    graph = normal(code, torch.randn(3, 2, 4), torch.randn(8))
    assert aten.reshape.default in targets(graph)


def test_what_is_put_at_pairs_of_places_has_a_dimension_less() -> None:
    """And would not fit with the one that a reshape took away."""

    def code(x: Any, y: Any) -> Any:
        pairs = torch.tensor([0, 1]), torch.tensor([1, 0])
        return (x * 2).index_put(pairs, y.reshape(2, 4)).exp()

    graph = normal(code, torch.randn(3, 2, 4), torch.randn(1, 2, 4))
    assert aten.reshape.default in targets(graph)


def test_a_mask_brings_no_size_into_the_graph() -> None:
    def code(x: Any, y: Any) -> Any:
        out = x * 2
        out[y > 0] = 0.5
        return out.exp()

    graph_module = capture(code, (torch.randn(BATCH, 4), torch.randn(BATCH, 4)), dynamic=True)
    before = guards_of(graph_module)
    normalize(graph_module.graph)
    assert guards_of(graph_module) == before
    assert aten.index_put_.default not in targets(graph_module.graph)


def test_a_graph_without_a_module_is_left() -> None:
    graph_module: GraphModule = capture(set_last, (torch.randn(2, 2, 5, 4), torch.randn(2, 2, 1, 4)))
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    normalize(graph)
    assert aten.full.default not in targets(graph)
