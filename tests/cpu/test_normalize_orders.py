"""The inverse of an order, however it is written, is one argsort; anything else that is scattered stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_checks import capture

from tilegym_fx.normalize import normalize

aten = torch.ops.aten


def targets(code: Callable[..., Any], *inputs: Any) -> list[Any]:
    graph_module = capture(code, inputs)
    normalize(graph_module.graph)
    graph_module.recompile()
    assert torch.equal(code(*inputs), graph_module(*inputs))
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def test_positions_written_to_where_they_came_from_are_an_argsort() -> None:
    def inverse(x: Any) -> Any:
        order = torch.sort(x)[1]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return back

    found = targets(inverse, torch.randn(11))
    assert found.count(aten.argsort.default) == 1
    assert aten.index_put_.default not in found


def not_a_permutation(x: Any) -> Any:
    places = (x > 0).long()
    back = torch.zeros_like(places)
    back[places] = torch.arange(places.shape[0])
    return back.clamp(max=0)


def not_counted_from_zero(x: Any) -> Any:
    order = torch.sort(x)[1]
    back = torch.empty_like(order)
    back[order] = torch.arange(1, order.shape[0] + 1)
    return back


def not_all_of_the_target(x: Any) -> Any:
    order = torch.sort(x)[1]
    back = torch.zeros(order.shape[0] + 2, dtype=torch.int64)
    back[order] = torch.arange(order.shape[0])
    return back


@pytest.mark.parametrize("code", [not_a_permutation, not_counted_from_zero, not_all_of_the_target])
def test_other_writes_by_index_stay(code: Callable[..., Any]) -> None:
    assert aten.argsort.default not in targets(code, torch.randn(11))
