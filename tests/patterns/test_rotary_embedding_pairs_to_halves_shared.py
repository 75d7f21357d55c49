"""rotary_embedding_pairs_to_halves_shared: pairs turn by half-width tables that broadcast over the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_pairs_to_halves_shared"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16, tables: torch.dtype = BF16) -> list[torch.Tensor]:
    """Queries and keys of [batch, heads, length, width], of which keys have one head, and half-width tables."""
    q, k, *_ = blocks.rotary_inputs(batch, length, dtype)
    return [q, k[:, :1], *(table[:, None] for table in blocks.rotary_tables(batch, length, 8, tables))]


def turn(x: Any, cos: Any, sin: Any) -> Any:
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turn(q, cos, sin), turn(k, cos, sin)


@everywhere
@pytest.mark.parametrize("tables", [None, FP32], ids=["same", "wide"])
@pytest.mark.parametrize("positions_first", [False, True])
def test_hit(positions_first: bool, tables: torch.dtype | None, dtype: torch.dtype, dynamic: bool) -> None:
    inputs = inputs_of(BATCH, LENGTH, dtype, tables or dtype)
    inputs = [x.transpose(1, 2) for x in inputs] if positions_first else inputs
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic, only=[NAME])


def other_way(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([even * cos + odd * sin, odd * cos - even * sin], dim=-1)

    return one(q), one(k)


def halves(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        low, high = x[..., :8], x[..., 8:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    return one(q), one(k)


def second_members_first(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def one(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([odd * cos + even * sin, even * cos - odd * sin], dim=-1)

    return one(q), one(k)


@pytest.mark.parametrize("other", [other_way, halves, second_members_first])
def test_near_miss(other: Callable[..., Any]) -> None:
    check_pass(other, inputs_of(2, 5), {}, left=None, only=[NAME])


@pytest.mark.parametrize("table", [(2, 4, 5, 8), (2, 1, 1, 8)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    q, *_ = inputs_of(2, 5)
    inputs = [q, q.clone(), *(rand(*table, seed=i) for i in range(2))]
    check_pass(code, inputs, {}, left=None, refused={NAME: "not a row for each position"}, only=[NAME])


def test_guard_on_keys_at_other_positions() -> None:
    q, k, cos, sin = (x.transpose(1, 2) for x in inputs_of(2, 5))
    check_pass(code, [q, k[:, :1], cos, sin], {}, left=None, refused={NAME: "but k is"}, only=[NAME])
