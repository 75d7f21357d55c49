"""rotary_embedding_partial: the first columns are turned by halves, the others pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

NAME = "rotary_embedding_partial"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    q, k, *_ = blocks.rotary_inputs(batch, length, dtype, 24)
    return [q, k, *blocks.rotary_tables(batch, length, 8, dtype)]


def split_by_width(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    (q, q_rest), (k, k_rest) = (torch.split(x, [8, 16], dim=-1) for x in (q, k))
    q, k = blocks.rotary(q, k, cos, sin)
    return torch.cat((q, q_rest), dim=-1), torch.cat((k, k_rest), dim=-1)


@everywhere
@pytest.mark.parametrize("code", [split_by_width, apply_rotary_pos_emb])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


@pytest.mark.parametrize("code", [apply_rotary_pos_emb])
def test_nothing_passes_through(code: Callable[..., Any]) -> None:
    """With tables as wide as the head it is the plain rotary_embedding."""
    check_pass(code, blocks.rotary_inputs(2, 5), {"rotary_embedding": 1})


def the_last_columns_are_turned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    (q_rest, q), (k_rest, k) = (torch.split(x, [16, 8], dim=-1) for x in (q, k))
    q, k = blocks.rotary(q, k, cos, sin)
    return torch.cat((q_rest, q), dim=-1), torch.cat((k_rest, k), dim=-1)


def the_rest_goes_first(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    (q, q_rest), (k, k_rest) = (torch.split(x, [8, 16], dim=-1) for x in (q, k))
    q, k = blocks.rotary(q, k, cos, sin)
    return torch.cat((q_rest, q), dim=-1), torch.cat((k_rest, k), dim=-1)


@pytest.mark.parametrize("code", [the_last_columns_are_turned, the_rest_goes_first])
def test_near_miss_other_columns(code: Callable[..., Any]) -> None:
    """What is turned is a rotary_embedding of its own; the parts around it stay."""
    check_pass(code, inputs_of(2, 5), {"rotary_embedding": 1}, left=6)


def test_near_miss_part_of_the_rest_is_lost() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        turned = blocks.rotary(q[..., :8], k[..., :8], cos, sin)
        return [torch.cat((x, rest[..., 16:]), dim=-1) for x, rest in zip(turned, (q, k), strict=True)]

    check_pass(code, inputs_of(2, 5), {"rotary_embedding": 1}, left=None)


@pytest.mark.parametrize("table", [(2, 5, 1), (2, 1, 8)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    inputs = [*inputs_of(2, 5)[:2], *(rand(*table, seed=i) for i in range(2))]
    check_pass(split_by_width, inputs, {}, left=None)


def test_guard_on_a_table_with_one_row() -> None:
    inputs = [*inputs_of(2, 5)[:2], *(rand(2, 1, 8, seed=i) for i in range(2))]
    check_pass(split_by_width, inputs, {}, left=None, refused={NAME: r"cos is .*, not \[1 or B, S, R\]"})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = inputs_of(2, 5)
    check_pass(split_by_width, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "does not broadcast"})
