"""rotary_embedding_interleaved_partial: neighbouring columns are a pair; only the first ones are turned."""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAME = "rotary_embedding_interleaved_partial"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    q, k, *_ = blocks.rotary_inputs(batch, length, dtype, 24)
    return [q, k, *(table[:, None] for table in blocks.rotary_tables(batch, length, 8, dtype))]


def turn(x: Any, cos: Any, sin: Any, start: int = 0) -> Any:
    part, rest = x[..., :8], x[..., 8:]
    pairs = torch.stack((-part[..., 1 - start :: 2], part[..., start::2]), dim=-1).flatten(-2)
    return torch.cat((part * cos + pairs * sin, rest), dim=-1)


def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return turn(q, cos, sin), turn(k, cos, sin)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, dynamic=dynamic)


@everywhere
def test_positions_before_heads(dtype: torch.dtype, dynamic: bool) -> None:
    q, k, cos, sin = (x.transpose(1, 2) for x in inputs_of(BATCH, LENGTH, dtype))
    check_pass(code, [q, k[:, :, :2], cos, sin], {NAME: 1}, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_float32_tables_beside_narrow_heads(dynamic: bool) -> None:
    """Results are float32, the columns that pass through as well."""
    q, k, *_ = inputs_of(BATCH, LENGTH)
    tables = inputs_of(BATCH, LENGTH, torch.float32)[2:]
    check_pass(code, [q, k, *tables], {NAME: 1}, dynamic=dynamic)


def test_heads_made_wide_before_are_a_place_in_float32() -> None:
    def rounded(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return [turn(x.float(), cos, sin).to(x.dtype) for x in (q, k)]

    q, k, *_ = inputs_of(2, 5)
    tables = inputs_of(2, 5, torch.float32)[2:]
    found = check_pass(rounded, [q, k, *tables], {NAME: 1}, left=None, only=[NAME])
    assert [v.meta["val"].dtype for v in found.chosen[0].match.outputs] == [torch.float32] * 2


def test_near_miss_odd_and_even_exchanged() -> None:
    def exchanged(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return turn(q, cos, sin, 1), turn(k, cos, sin, 1)

    check_pass(exchanged, inputs_of(2, 5), {}, left=None, only=[NAME])


def test_near_miss_halves() -> None:
    def halves(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        turned = (x[..., :8] * cos + blocks.rotate_half(x[..., :8]) * sin for x in (q, k))
        return [torch.cat((t, x[..., 8:]), dim=-1) for t, x in zip(turned, (q, k), strict=True)]

    check_pass(halves, inputs_of(2, 5), {}, left=None, only=[NAME])


@pytest.mark.parametrize("table", [(2, 4, 5, 8), (2, 1, 1, 8)], ids=str)
def test_guard_on_tables_that_do_not_fit(table: tuple[int, ...]) -> None:
    q, *_ = inputs_of(2, 5)
    inputs = [q, q.clone(), *(rand(*table, seed=i) for i in range(2))]
    check_pass(code, inputs, {}, left=None, refused={NAME: "not a row for some columns"})


def test_guard_on_tables_of_two_shapes() -> None:
    q, k, cos, sin = inputs_of(2, 5)
    check_pass(code, [q, k, cos, sin[:1]], {}, left=None, refused={NAME: "does not broadcast"})
