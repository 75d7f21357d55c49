"""concat_last, concat_last_shared and sigmoid_mul."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

check = partial(check_pass, only=("concat_last", "concat_last_shared", "sigmoid_mul"))


def assembled(a: Any, b: Any) -> Any:
    whole = a.new_empty(*a.shape[:-1], a.shape[-1] + b.shape[-1])
    whole[..., : a.shape[-1]] = a
    whole[..., a.shape[-1] :] = b
    return whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("code", [assembled, lambda a, b: torch.cat((a, b.expand(-1, 6, -1, -1)), -1)])
def test_hit_however_it_is_put_together(code: Any, heads: int, dtype: torch.dtype) -> None:
    name = "concat_last_shared" if heads == 1 else "concat_last"
    check(code, [rand(2, 6, 5, 16, dtype=dtype), rand(2, heads, 5, 8, dtype=dtype)], {name: 1})


def test_hit_for_a_part_that_was_written_before_it_is_copied() -> None:
    """The rotated key of a static cache."""

    def code(a: Any, cache: Any, key: Any) -> Any:
        return assembled(a, cache.index_copy_(2, torch.arange(3, 4), key))

    inputs = [rand(2, 6, 5, 16), rand(2, 1, 5, 8), rand(2, 1, 1, 8, seed=1)]
    check(code, inputs, {"concat_last_shared": 1}, left=None)


def test_near_miss_a_part_that_is_written_before_the_last_one_is_copied() -> None:
    def code(a: Any, b: Any) -> Any:
        whole = a.new_empty(*a.shape[:-1], 24)
        whole[..., :16] = a
        a.add_(1)
        whole[..., 16:] = b
        return whole

    check(code, [rand(2, 6, 5, 16), rand(2, 6, 5, 8)], {}, left=None)


def test_near_miss_a_place_that_is_never_filled() -> None:
    def code(a: Any, b: Any) -> Any:
        whole = a.new_zeros(*a.shape[:-1], 30)
        whole[..., :16] = a
        whole[..., 16:24] = b
        return whole

    check(code, [rand(2, 6, 5, 16), rand(2, 6, 5, 8)], {}, left=None)


def test_near_miss_read_before_it_is_full() -> None:
    def code(a: Any, b: Any) -> Any:
        whole = a.new_zeros(*a.shape[:-1], 24)
        whole[..., :16] = a
        early = whole.sum()
        whole[..., 16:] = b
        return whole, early

    check(code, [rand(2, 6, 5, 16), rand(2, 6, 5, 8)], {}, left=None)


def test_near_miss_places_filled_twice() -> None:
    def code(a: Any, b: Any) -> Any:
        whole = a.new_zeros(*a.shape[:-1], 24)
        whole[..., :16] = a
        whole[..., 8:] = b
        return whole

    check(code, [rand(2, 6, 5, 16), rand(2, 6, 5, 16)], {}, left=None)


def test_near_miss_what_was_put_in_is_written_afterwards() -> None:
    def code(a: Any, b: Any) -> Any:
        part = a * 1.5
        whole = a.new_zeros(*a.shape[:-1], 24)
        whole[..., :16] = part
        part.add_(1.0)
        whole[..., 16:] = b
        return whole, part

    check(code, [rand(2, 6, 5, 16), rand(2, 6, 5, 8)], {}, left=None)


def test_guard_three_dimensions() -> None:
    refused = {"concat_last": "a has 3 dimensions, not 4"}
    check(lambda a, b: torch.cat((a, b), -1), [rand(2, 5, 16), rand(2, 5, 8)], {}, left=None, refused=refused)


@everywhere
@pytest.mark.parametrize("columns", [48, 1])
def test_sigmoid_gate(columns: int, dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, LENGTH, 48, dtype=dtype), rand(BATCH, LENGTH, columns, dtype=dtype)]
    check(lambda x, gate: x * torch.sigmoid(gate), inputs, {"sigmoid_mul": 1}, dynamic=dynamic)


def test_near_miss_the_gate_is_a_row_for_all() -> None:
    refused = {"sigmoid_mul": r"gate is \[48\]"}
    check(lambda x, g: x * torch.sigmoid(g), [rand(5, 48), rand(48)], {}, left=None, refused=refused)


def test_near_miss_the_sigmoid_is_also_returned() -> None:
    def code(x: Any, gate: Any) -> Any:
        opened = torch.sigmoid(gate)
        return x * opened, opened

    check(code, [rand(5, 48), rand(5, 48)], {}, left=None, refused={"sigmoid_mul": "also read by output"})
