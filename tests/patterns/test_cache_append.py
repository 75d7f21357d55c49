"""cache_append: new keys or values behind those of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_checks import BATCH, FP32, LENGTH, check_pass, everywhere, rand

NAME = "cache_append"


def by_negative_dim(cache: Any, new: Any) -> Any:
    return torch.cat([cache, new], dim=-2)


def by_positive_dim(cache: Any, new: Any) -> Any:
    return torch.cat((cache, new), 2)


@everywhere
@pytest.mark.parametrize("code", [by_negative_dim, by_positive_dim])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [rand(BATCH, 2, LENGTH, 16, dtype=dtype), rand(BATCH, 2, 1, 16, dtype=dtype)]
    check_pass(code, inputs, {NAME: 1}, dynamic=dynamic)


def test_keys_and_values_of_two_layers() -> None:
    def code(*values: Any) -> Any:
        return [torch.cat(pair, dim=2) for pair in zip(values[::2], values[1::2], strict=True)]

    check_pass(code, [rand(2, 2, 5 if i % 2 else 9, 16, seed=i) for i in range(8)], {NAME: 4})


def test_the_new_tokens_come_second() -> None:
    outcome = check_pass(
        lambda new, cache: torch.cat((cache, new), -2), [rand(2, 2, 1, 16), rand(2, 2, 9, 16)], {NAME: 1}
    )
    assert str(outcome.chosen[0].match.inputs["cache"]) == "arg1_1"


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_near_miss_along_another_dimension(dim: int) -> None:
    check_pass(lambda a, b: torch.cat((a, b), dim), [rand(2, 2, 5, 16), rand(2, 2, 5, 16, seed=1)], {}, left=1)


def test_near_miss_three_parts() -> None:
    check_pass(lambda a, b: torch.cat((a, b, a), 2), [rand(2, 2, 5, 16), rand(2, 2, 5, 16, seed=1)], {}, left=1)


def test_near_miss_with_itself() -> None:
    """One value for two inputs is still two reads."""
    check_pass(lambda a: torch.cat((a, a), 2), [rand(2, 2, 5, 16)], {NAME: 1})


@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16), (2, 2, 2, 5, 16)], ids=str)
def test_guard_on_the_rank(shape: tuple[int, ...]) -> None:
    check_pass(
        by_negative_dim,
        [rand(*shape), rand(*shape, seed=1)],
        {},
        left=1,
        refused={NAME: "dimensions, not 4"},
    )


def test_guard_on_two_dtypes() -> None:
    inputs = [rand(2, 2, 5, 16, dtype=FP32), rand(2, 2, 1, 16)]
    check_pass(by_negative_dim, inputs, {}, left=1, refused={NAME: "the cache is torch.float32"})
