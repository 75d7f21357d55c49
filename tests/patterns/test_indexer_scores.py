"""indexer_scores: what the indexer of sparse attention ranks keys by."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, rand

NAME = "indexer_scores"
check = partial(check_pass, only=(NAME,))


def inputs() -> list[torch.Tensor]:
    return [
        rand(BATCH, LENGTH, 4, 16),
        rand(BATCH, 10, 16),
        rand(BATCH, LENGTH, 4, dtype=torch.float32),
    ]


def scores(q: Any, k: Any, weights: Any, *, scale: float | None = 0.25, act: Any = F.relu) -> Any:
    products = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
    products = act(products if scale is None else products * scale)
    return torch.matmul(weights.unsqueeze(-2), products).squeeze(-2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("scale", [0.25, None])
def test_hit_with_its_factor(scale: float | None, dynamic: bool) -> None:
    outcome = check(partial(scores, scale=scale), inputs(), {NAME: 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["scale"] == (1.0 if scale is None else scale)


def test_near_miss_another_activation() -> None:
    check(partial(scores, act=F.silu), inputs(), {}, left=None)


def test_near_miss_products_in_sixteen_bits() -> None:
    def code(q: Any, k: Any, weights: Any) -> Any:
        products = torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)).float() * 0.25
        return torch.matmul(weights.unsqueeze(-2), F.relu(products)).squeeze(-2)

    check(code, inputs(), {}, left=None)


def test_near_miss_summed_over_keys() -> None:
    def code(q: Any, k: Any, weights: Any) -> Any:
        products = F.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * 0.25)
        return torch.matmul(products.transpose(-1, -2), weights.unsqueeze(-1)).sum(-2)

    check(code, inputs(), {}, left=None)


def test_guard_one_weight_for_all_positions() -> None:
    q, k, weights = inputs()
    check(scores, [q, k, weights[:, :1]], {}, left=None, refused={NAME: r"weights is .*, not \[B, S, Hd\]"})
