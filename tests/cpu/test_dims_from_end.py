"""Dimensions are counted from the end only where they are those of the first tensor: results stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tilegym_fx.normalize import normalize

Function = Callable[[torch.Tensor], torch.Tensor]

#: What an argument called `dim` or `dims` counts in is not the first tensor, or is no dimension.
OTHERS: dict[str, Function] = {
    "unsqueeze in place": lambda x: (x * 2).unsqueeze_(0) + 1,
    "unsqueeze in place, second": lambda x: (x * 2).unsqueeze_(1) + 1,
    "diag_embed": lambda x: torch.diag_embed(x, 0, 0, 2) + 1,
    "diag_embed, first of all": lambda x: torch.diag_embed(x, 0, 0, 1) + 1,
    "cat with an empty vector": lambda x: torch.cat([x.new_zeros(0), x, x], 1),
    "cat with an empty vector between": lambda x: torch.cat([x, x.new_zeros(0), x], 0),
    "cosine_similarity of ranks": lambda x: torch.cosine_similarity(x[0], x, dim=0),
    "tile": lambda x: x.tile(2, 1, 1),
    "tile, more than there are": lambda x: x.tile(2, 1, 3, 1),
    "transpose in place": lambda x: (x * 2).transpose_(0, 1) + 1,
    "squeeze in place": lambda x: (x[:1] * 2).squeeze_(0) + 1,
}
#: The first tensor's, which other forms of the same have to reach.
OF_FIRST: dict[str, tuple[Function, Function]] = {
    "cat": (lambda x: torch.cat([x, x], 1), lambda x: torch.cat([x, x], -2)),
    "stack": (lambda x: torch.stack([x, x], 1), lambda x: torch.stack([x, x], -3)),
    "sum": (lambda x: x.sum((0, 1)), lambda x: x.sum((-3, -2))),
    "unsqueeze": (lambda x: x.softmax(1).unsqueeze(1), lambda x: x.softmax(-2).unsqueeze(-3)),
    "index_copy": (
        lambda x: x.index_copy(0, torch.tensor([0]), x[:1]), lambda x: x.index_copy(-3, torch.tensor([0]), x[:1])
    ),
}  # fmt: skip


def normal(function: Function) -> GraphModule:
    module = make_fx(function, pre_dispatch=True)(torch.randn(3, 3, 3))
    normalize(module.graph)
    module.recompile()
    return module


@pytest.mark.parametrize("name", OTHERS)
def test_what_counts_otherwise_stays_as_it_is(name: str) -> None:
    x = torch.randn(3, 3, 3)
    expected, found = OTHERS[name](x), normal(OTHERS[name])(x)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", OF_FIRST)
def test_two_ways_to_count_are_one(name: str) -> None:
    one, other = map(normal, OF_FIRST[name])
    assert [
        (n.target, n.args) for n in one.graph.nodes if n.op == "call_function" and "dim" in str(n.target._schema)
    ] or name == "index_copy"
    assert str(one.code).split("def forward")[1] == str(other.code).split("def forward")[1]
    x = torch.randn(3, 3, 3)
    assert torch.equal(one(x), OF_FIRST[name][0](x))


@pytest.mark.parametrize("function", [
    lambda x: _changed(x, lambda v: v.sum_to_size(3, 3, 3)),
    lambda x: _changed(x, lambda v: torch.unsafe_chunk(v, 1)[0]),
    lambda x: _changed(x, lambda v: torch.unsafe_split(v, 3)[0]),
    lambda x: _changed(x[0, 0], torch.cartesian_prod),
])  # fmt: skip
def test_what_may_be_its_input_is_known_to_be(function: Function) -> None:
    x = torch.randn(3, 3, 3)
    assert torch.equal(normal(function)(x.clone()), function(x.clone()))


def _changed(x: torch.Tensor, alias: Function) -> torch.Tensor:
    value = x * 2
    seen = alias(value)
    value.add_(1)
    return seen + 0
