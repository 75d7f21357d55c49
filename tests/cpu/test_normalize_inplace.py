"""Writes in place that nobody can see become plain arithmetic; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_checks import capture

from tilegym_fx.normalize import normalize

aten = torch.ops.aten
Case = Callable[..., Any]


def targets(code: Case, *inputs: Any) -> list[Any]:
    graph_module = capture(code, inputs)
    normalize(graph_module.graph)
    graph_module.recompile()
    expected, got = code(*(x.clone() for x in inputs)), graph_module(*(x.clone() for x in inputs))
    assert all(map(torch.equal, *((r,) if isinstance(r, torch.Tensor) else r for r in (expected, got))))
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def bias_added_to_a_product(x: Any, y: Any) -> Any:
    out = x @ y
    out.add_(y)
    return out * 2


def divided_by_its_own_sum(x: Any, y: Any) -> Any:
    values, _ = torch.topk(x, 2)
    values /= values.sum(-1, keepdim=True)
    return values


def added_in_the_shape_of_what_is_written(x: Any, y: Any) -> Any:
    out = x @ y
    out.add_(y[:1].expand_as(out))
    return out * 2


@pytest.mark.parametrize(
    "code", [bias_added_to_a_product, divided_by_its_own_sum, added_in_the_shape_of_what_is_written]
)
def test_a_new_value_is_not_written_but_replaced(code: Case) -> None:
    assert not {aten.add_.Tensor, aten.div_.Tensor} & set(targets(code, torch.randn(4, 4), torch.randn(4, 4)))


def input_is_written(x: Any, y: Any) -> Any:
    x.add_(y)
    return x


def expanded_value_is_written(x: Any, y: Any) -> Any:
    row = x[:1] * 2
    shown = row.expand_as(y)
    row.add_(1)
    return shown + y


def view_is_written(x: Any, y: Any) -> Any:
    out = x * 2
    out[0].add_(y[0])
    return out


def view_of_it_is_kept(x: Any, y: Any) -> Any:
    out = x * 2
    part = out[1:]
    written = out.add_(y)
    return written * 1.5, part + 0.5


def part_of_another_value(x: Any, y: Any) -> Any:
    whole = x * 2
    first, _ = whole.chunk(2)
    return first.add_(y[:2]), whole + 1


@pytest.mark.parametrize(
    "code",
    [input_is_written, expanded_value_is_written, view_is_written, view_of_it_is_kept, part_of_another_value],
)
def test_a_write_that_somebody_can_see_stays(code: Case) -> None:
    assert aten.add_.Tensor in targets(code, torch.randn(4, 4), torch.randn(4, 4))


def test_a_result_that_would_be_promoted_is_still_written() -> None:
    def code(x: Any, y: Any) -> Any:
        return (x * 2).add_(y)

    assert aten.add_.Tensor in targets(code, torch.randn(4, 4).bfloat16(), torch.randn(4, 4))
