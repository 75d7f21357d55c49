"""cache_write: new keys and values put into a static cache, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand
from transformers.cache_utils import StaticLayer

NAME = "cache_write"
HELD = 16
Tensors = tuple[Any, ...]
check = partial(check_pass, only=(NAME,))


def inputs_of(batch: int = 2, length: int = 3, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    new = [rand(batch, 2, length, 8, dtype=dtype, seed=seed) for seed in (0, 1)]
    cache = [rand(batch, 2, HELD, 8, dtype=dtype, seed=seed) for seed in (2, 3)]
    return [*new, *cache, torch.arange(length) + 4]


def in_place(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return torch.tanh(keys), torch.tanh(values)


def anew(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    return torch.tanh(keys.index_copy(-2, positions, k)), torch.tanh(values.index_copy(2, positions, v))


@everywhere
@pytest.mark.parametrize(("code", "written"), [(in_place, {0: "keys", 1: "values"}), (anew, {})])
def test_hit(code: Callable[..., Any], written: dict[int, str], dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, left=2, dynamic=dynamic)
    assert dict(outcome.chosen[0].match.written) == written


def of_transformers(k: Any, v: Any, keys: Any, values: Any, length: Any) -> Tensors:
    layer = StaticLayer.__new__(StaticLayer)
    layer.keys, layer.values, layer.cumulative_length = keys, values, length
    layer.device, layer.is_initialized = keys.device, True
    keys, values = layer.update(k, v)
    return torch.tanh(keys), torch.tanh(values)


def test_hit_in_transformers_own_static_cache() -> None:
    check(of_transformers, [*inputs_of()[:-1], torch.tensor(4)], {NAME: 1}, left=5)


def test_two_layers_whose_positions_are_the_same() -> None:
    """Each layer's keys go with its own values; a third cache is nobody's values."""

    def code(k: Any, v: Any, keys: Any, values: Any, more: Any, others: Any, positions: Any) -> Tensors:
        first = in_place(k, v, keys, values, positions)
        return *first, *in_place(torch.tanh(k), torch.tanh(v), more, others, positions)

    inputs = inputs_of()
    caches = [rand(2, 2, HELD, 8, seed=seed) for seed in (4, 5)]
    check(code, [*inputs[:-1], *caches, inputs[-1]], {NAME: 2}, left=6)


def one_of_them(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    return torch.tanh(keys), torch.tanh(values)


def at_other_positions(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions + 1, v)
    return torch.tanh(keys), torch.tanh(values)


def along_another_dimension(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    keys.index_copy_(1, positions, k.transpose(1, 2))
    values.index_copy_(1, positions, v.transpose(1, 2))
    return torch.tanh(keys), torch.tanh(values)


def read_between(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    seen = torch.tanh(keys)
    values.index_copy_(2, positions, v)
    return seen, torch.tanh(values)


def into_one_cache(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    keys.index_copy_(2, positions, v)
    return torch.tanh(keys), torch.tanh(values)


def values_of_another_cache(k: Any, v: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    keys.index_copy_(2, positions, k)
    values = values[:1].index_copy_(2, positions, v[:1])
    return torch.tanh(keys), torch.tanh(values)


@pytest.mark.parametrize(
    "code",
    [
        one_of_them, at_other_positions, along_another_dimension, read_between, into_one_cache, values_of_another_cache,
    ],
)  # fmt: skip
def test_near_miss(code: Callable[..., Any]) -> None:
    check(code, inputs_of(), {}, left=None)
