"""The routers: which experts a token goes to, and with what weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import check_pass, rand

check = partial(check_pass, only=(
    "router_softmax_topk", "router_softmax_topk_fp32", "router_softmax_topk_norm",
    "router_softmax_topk_norm_fp32", "router_topk_softmax",
))  # fmt: skip


def rounded(logits: Any) -> Any:
    shares, index = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), 3, dim=-1)
    return shares.to(logits.dtype), index


def wide(logits: Any) -> Any:
    return tuple(torch.topk(torch.softmax(logits.float(), dim=-1), 3, dim=-1))


def divided_and_rounded(logits: Any) -> Any:
    shares, index = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), 3, dim=-1)
    shares /= shares.sum(dim=-1, keepdim=True)
    return shares.to(logits.dtype), index


def divided(logits: Any) -> Any:
    shares, index = torch.topk(torch.softmax(logits.float(), dim=-1), 3, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), index


def of_the_best(logits: Any) -> Any:
    best, index = torch.topk(logits, 3, dim=-1)
    return torch.softmax(best, dim=-1, dtype=best.dtype), index


HITS = {
    "router_softmax_topk": rounded,
    "router_softmax_topk_fp32": wide,
    "router_softmax_topk_norm": divided_and_rounded,
    "router_softmax_topk_norm_fp32": divided,
    "router_topk_softmax": of_the_best,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", HITS)
def test_hit(name: str, dynamic: bool) -> None:
    check(HITS[name], [rand(3, 40)], {name: 1}, dynamic=dynamic)


def test_hit_in_any_order() -> None:
    def code(logits: Any) -> Any:
        shares, index = torch.topk(torch.softmax(logits.float(), dim=1), 3, dim=-1, sorted=False)
        return shares.sum(-1), torch.sort(index)[0]

    check(code, [rand(3, 40)], {"router_softmax_topk_fp32": 1}, left=None)


def test_the_number_of_experts_is_captured() -> None:
    outcome = check(divided, [rand(3, 40)], {"router_softmax_topk_norm_fp32": 1})
    assert outcome.chosen[0].match.inputs["k"] == 3


def test_near_miss_the_smallest_are_chosen() -> None:
    def code(logits: Any) -> Any:
        shares, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 3, largest=False)
        return shares.to(logits.dtype), index

    check(code, [rand(3, 40)], {}, left=None)


def test_near_miss_the_divided_shares_are_read_before() -> None:
    def code(logits: Any) -> Any:
        shares, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 3)
        return (shares / shares.sum(-1, keepdim=True)).to(logits.dtype), index, shares

    check(code, [rand(3, 40)], {"router_softmax_topk_fp32": 1}, left=None)


@pytest.mark.parametrize("name", HITS)
def test_guard_on_logits_of_three_dimensions(name: str) -> None:
    refused = {name: "3 dimensions, not 2"}
    code = HITS[name]
    check(code, [rand(2, 3, 40)], {}, left=None, refused=refused)
