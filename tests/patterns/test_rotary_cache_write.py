"""rotary_cache_write: q and k turned by halves, k and v put into a static cache, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import blocks
import pytest
import torch
from blocks import rotary_inputs
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

NAME = "rotary_cache_write"
HELD = 16
WRITTEN = {1: "keys", 2: "values"}
Tensors = tuple[Any, ...]
check = partial(check_pass, only=(NAME,))


def inputs_of(batch: int = 2, length: int = 3, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    q, k, cos, sin = rotary_inputs(batch, length, dtype)
    v, cache = rand(*k.shape, dtype=dtype, seed=5), (batch, k.shape[1], HELD, k.shape[3])
    keys, values = (rand(*cache, dtype=dtype, seed=seed) for seed in (6, 7))
    return [q, k, v, cos, sin, keys, values, torch.arange(length) + 4]


def in_place(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q, torch.tanh(keys), torch.tanh(values)


def values_first(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    values = values.index_copy_(-2, positions, v)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    keys = keys.index_copy_(-2, positions, k)
    return torch.tanh(values), q, torch.tanh(keys)


def anew(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    return q, torch.tanh(keys.index_copy(2, positions, k)), torch.tanh(values.index_copy(2, positions, v))


@everywhere
@pytest.mark.parametrize("code", [in_place, values_first])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(code, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, left=2, dynamic=dynamic)
    assert dict(outcome.chosen[0].match.written) == WRITTEN


@everywhere
def test_hit_on_a_cache_that_is_made_anew(dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(anew, inputs_of(BATCH, LENGTH, dtype), {NAME: 1}, left=2, dynamic=dynamic)
    assert dict(outcome.chosen[0].match.written) == {}


def static_layer(keys: Any, values: Any, length: Any) -> StaticLayer:
    layer = StaticLayer.__new__(StaticLayer)
    layer.keys, layer.values, layer.cumulative_length = keys, values, length
    layer.device, layer.is_initialized = keys.device, True
    return layer


def of_transformers(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, length: Any) -> Tensors:
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    keys, values = static_layer(keys, values, length).update(k, v)
    return q, torch.tanh(keys), torch.tanh(values)


@pytest.mark.parametrize("length", [1, 3])
def test_hit_in_transformers_own_static_cache(length: int) -> None:
    """Left are the positions (two calls), the new length, and what reads the cache."""
    inputs = [*inputs_of(2, length)[:-1], torch.tensor(4)]
    outcome = check(of_transformers, inputs, {NAME: 1}, left=5)
    assert dict(outcome.chosen[0].match.written) == WRITTEN


def test_two_steps_into_one_cache() -> None:
    def code(*values: Any) -> Tensors:
        first = of_transformers(*values)
        return *first, *of_transformers(*(torch.tanh(x) for x in values[:3]), *values[3:])

    check(code, [*inputs_of(2, 1)[:-1], torch.tensor(4)], {NAME: 2}, left=12)


def test_the_old_tokens_may_be_read_before() -> None:
    def code(*values: Any) -> Tensors:
        old = torch.tanh(values[5]), torch.tanh(values[6])
        return *old, *in_place(*values)

    check(code, inputs_of(), {NAME: 1}, left=4)


def test_whole_rotation_in_float32_tables() -> None:
    inputs = inputs_of()
    q, k, v, cos, sin, keys, values, positions = inputs
    inputs = [q, k, v, cos.float(), sin.float(), keys.float(), values, positions]
    outcome = check(in_place, inputs, {NAME: 1}, left=2)
    assert [node.meta["val"].dtype for node in outcome.chosen[0].match.outputs] == [FP32, FP32, BF16]


def read_between(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys.index_copy_(2, positions, k)
    seen = torch.tanh(keys)
    values.index_copy_(2, positions, v)
    return q, seen, torch.tanh(values)


def written_between(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys.index_copy_(2, positions, k)
    keys.mul_(2.0)
    values.index_copy_(2, positions, v)
    return q, torch.tanh(keys), torch.tanh(values)


def into_one_cache(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys.index_copy_(2, positions, k)
    keys.index_copy_(2, positions, v)
    return q, torch.tanh(keys), torch.tanh(values)


def into_views_of_one_cache(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any
) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys[:, :, :8].index_copy_(2, positions, k)
    keys[:, :, 4:].index_copy_(2, positions, v)
    return q, torch.tanh(keys), torch.tanh(values)


def values_come_from_the_cache(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any
) -> Tensors:
    return in_place(q, k, values[:, :, :3], cos, sin, keys, values, positions)


def half_of_it_anew(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    return q, torch.tanh(keys.index_copy_(2, positions, k)), torch.tanh(values.index_copy(2, positions, v))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (read_between, "may see that index_copy_ writes in place"),
        (written_between, "may see that index_copy_ writes in place"),
        (into_one_cache, "its values would be index_copy_"),
        (into_views_of_one_cache, "may see that index_copy_"),
        (values_come_from_the_cache, "may see that index_copy_"),
        (half_of_it_anew, "is a new value, and others of its results are written in place"),
    ],
)
def test_near_miss_in_memory(code: Callable[..., Any], reason: str) -> None:
    check(code, inputs_of(), {}, left=None, refused={NAME: reason})


def at_other_positions(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    return q, keys.index_copy_(2, positions, k), values.index_copy_(2, positions + 1, v)


def unrotated(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    turned, _ = blocks.rotary(q, k, cos, sin)
    return turned, keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def along_another_dimension(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any
) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    keys, values = (x[:, :, :3].repeat(1, 1, 1, 2) for x in (keys, values))
    columns = torch.arange(k.shape[3])
    return q, keys.index_copy_(3, columns, k), values.index_copy_(3, columns, v)


def new_keys_are_read(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any) -> Tensors:
    q, k = blocks.rotary(q, k, cos, sin)
    return q, k, keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


@pytest.mark.parametrize("code", [at_other_positions, unrotated, along_another_dimension, new_keys_are_read])
def test_near_miss(code: Callable[..., Any]) -> None:
    check(code, inputs_of(), {}, left=None)
