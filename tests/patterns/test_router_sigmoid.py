"""router_sigmoid and router_sigmoid_groups: sigmoids with a bias where experts are chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import check_pass, rand

NAMES = ("router_sigmoid", "router_sigmoid_groups")
check = partial(check_pass, only=NAMES)
LOGITS, BIAS = rand(5, 12), rand(12, dtype=torch.float32)


def chosen(scores: Any, ranks: Any, eps: float = 1e-20, scale: float = 2.5) -> Any:
    index = torch.topk(ranks, k=3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    weights /= weights.sum(dim=-1, keepdim=True) + eps
    weights = weights * scale
    return weights.sort(dim=-1)[0], index.sort(dim=-1)[0]  # in which order they stand is left open


def plain(logits: Any, bias: Any) -> Any:
    scores = torch.sigmoid(logits.float())
    return chosen(scores, scores + bias)


def shares(logits: Any, bias: Any) -> Any:
    scores = torch.sigmoid(logits.float())
    return chosen(scores, scores + bias, eps=0.0, scale=1.0)


def unscaled(logits: Any, bias: Any) -> Any:
    scores = torch.sigmoid(logits.float())
    return chosen(scores, scores + bias, scale=1.0)


def grouped(logits: Any, bias: Any, *, fill: float = float("-inf"), scale: float = 2.5, best: int = 2) -> Any:
    scores = logits.to(torch.float32).sigmoid()
    ranks = scores + bias
    worth = ranks.view(-1, 4, 3).topk(best, dim=-1)[0].sum(dim=-1)
    taken = torch.topk(worth, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(worth)
    mask.scatter_(1, taken, 1)
    opened = mask.unsqueeze(-1).expand(-1, 4, 3).reshape(-1, 12)
    return chosen(scores, ranks.masked_fill(~opened.bool(), fill), scale=scale)


HITS = {
    "plain": (plain, "router_sigmoid", {"k": 3, "eps": 1e-20, "scale": 2.5}),
    "shares": (shares, "router_sigmoid", {"k": 3, "eps": 0.0, "scale": 1.0}),
    "unscaled": (unscaled, "router_sigmoid", {"k": 3, "eps": 1e-20, "scale": 1.0}),
    "groups": (grouped, "router_sigmoid_groups", {"k": 3, "groups": 4, "kept": 2, "eps": 1e-20, "scale": 2.5}),
    "groups unscaled": (partial(grouped, scale=1.0), "router_sigmoid_groups", {"groups": 4, "scale": 1.0}),
}


@pytest.mark.parametrize("logits", [LOGITS, LOGITS.float()], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", HITS)
def test_hit_with_its_numbers_also_those_that_leave_no_trace(case: str, logits: torch.Tensor) -> None:
    code, name, numbers = HITS[case]
    outcome = check(code, [logits, BIAS], {name: 1}, left=None)
    assert numbers.items() <= outcome.chosen[0].match.inputs.items()


def test_near_miss_masked_with_zero() -> None:
    check(partial(grouped, fill=0.0), [LOGITS, BIAS], {}, left=None, refused={"router_sigmoid_groups": "not -inf"})


def test_near_miss_a_group_is_worth_its_best_expert() -> None:
    check(partial(grouped, best=1), [LOGITS, BIAS], {}, left=None)


def test_near_miss_weights_with_the_bias() -> None:
    def code(logits: Any, bias: Any) -> Any:
        ranks = torch.sigmoid(logits.float()) + bias
        return chosen(ranks, ranks)

    check(code, [LOGITS, BIAS], {}, left=None)


def test_near_miss_softmax_scores() -> None:
    def code(logits: Any, bias: Any) -> Any:
        scores = torch.softmax(logits.float(), -1)
        return chosen(scores, scores + bias)

    check(code, [LOGITS, BIAS], {}, left=None)


def test_guard_one_bias_for_each_token() -> None:
    refused = {"router_sigmoid": "bias"}
    check(plain, [LOGITS, rand(5, 12, dtype=torch.float32)], {}, left=None, refused=refused)
