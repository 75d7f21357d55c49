"""What the matcher compares of a call: operation, operands and literals, whatever way the call was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import capture, rand
from torch.fx import Node

from tilegym_fx.facts import Facts, Symbol, facts_of, graph_facts, operations_of
from tilegym_fx.normalize import normalize

aten = torch.ops.aten


def calls(code: Callable[..., Any], *inputs: Any, dynamic: bool = False, normal: bool = True) -> list[Node]:
    graph = capture(code, inputs or [rand(3, 8), rand(3, 8, seed=1)], dynamic=dynamic).graph
    if normal:
        normalize(graph)
    return [node for node in graph.nodes if node.op == "call_function"]


def only(code: Callable[..., Any], *inputs: Any, **how: Any) -> Facts:
    (node,) = calls(code, *inputs, **how)
    return facts_of(node)


class TestOperations:
    def test_views_of_one_shape_are_one_operation(self) -> None:
        flat = only(lambda x: x.flatten(), rand(3, 8))
        view = only(lambda x: x.view(24), rand(3, 8))
        assert (flat.operation, flat.literals) == (view.operation, view.literals) == ("reshape", (("shape[0]", 24),))

    def test_views_of_another_shape_have_other_literals(self) -> None:
        assert only(lambda x: x.view(24), rand(3, 8)).literals != only(lambda x: x.view(6, 4), rand(3, 8)).literals

    def test_what_a_kernel_could_be_for_leaves_out_views_and_casts(self) -> None:
        graph = calls(lambda x, y: torch.tanh(x.view(24).float()).to(y.dtype))[0].graph
        assert operations_of(graph) == {aten.tanh.default}

    def test_facts_are_of_calls_alone(self) -> None:
        graph = calls(lambda x, y: x * y)[0].graph
        assert [n.op for n in graph_facts(graph)] == ["call_function"]


class TestLiterals:
    def test_a_default_equals_the_same_value_given(self) -> None:
        given = only(lambda x: torch.softmax(x, -1, dtype=None), rand(3, 8), normal=False)
        left_out = only(lambda x: torch.softmax(x, -1), rand(3, 8), normal=False)
        assert given.literals == left_out.literals

    def test_another_value_is_another_literal(self) -> None:
        assert only(lambda x: torch.softmax(x, -1), rand(3, 8)) != only(lambda x: torch.softmax(x, 0), rand(3, 8))

    def test_tensors_in_a_list_are_operands_and_their_number_a_literal(self) -> None:
        facts = only(lambda x, y: torch.cat([x, y, x], dim=-1))
        first, second, third = facts.operands
        assert first is third is not second
        assert ("tensors.length", 3) in facts.literals

    def test_what_chooses_an_implementation_is_no_matter(self) -> None:
        facts = only(lambda x, w: F.layer_norm(x, (8,), w), rand(3, 8), rand(8))
        assert not {"cudnn_enable"} & {place for place, _ in facts.literals}

    def test_an_open_size_is_a_symbol_equal_to_itself(self) -> None:
        nodes = calls(lambda x: (x * x.shape[0], x + x.shape[0]), rand(7, 4), dynamic=True)
        symbols = [v for n in nodes for _, v in facts_of(n).literals if isinstance(v, Symbol)]
        assert symbols[0] == symbols[1]
        assert symbols[0] != Symbol("another", nodes[0])


class TestOrder:
    @pytest.mark.parametrize("code", [lambda x, y: x * y, lambda x, y: x + y])
    def test_sums_and_products_commute(self, code: Callable[..., Any]) -> None:
        assert only(code).commutes

    @pytest.mark.parametrize(
        "code", [lambda x, y: x - y, lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x / y, lambda x, y: x * 2]
    )
    def test_what_has_sides_does_not(self, code: Callable[..., Any]) -> None:
        assert not any(facts_of(node).commutes for node in calls(code))
