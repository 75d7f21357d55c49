"""cache_roll_write: a full cache of a sliding window moved up by one token, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BATCH, BF16, FP32, capture, check_pass, everywhere, find_in, rand
from transformers.cache_utils import StaticSlidingWindowLayer

NAME = "cache_roll_write"
HELD = 16
WRITTEN = {0: "keys", 1: "values"}
Tensors = tuple[Any, ...]
check = partial(check_pass, only=(NAME,))


def inputs_of(batch: int = 2, heads: int = 2, dtype: torch.dtype = BF16, tokens: int = 1) -> list[torch.Tensor]:
    new = [rand(batch, heads, tokens, 8, dtype=dtype, seed=seed) for seed in (0, 1)]
    return [*new, *(rand(batch, heads, HELD, 8, dtype=dtype, seed=seed) for seed in (2, 3))]


def rolled(cache: Any, new: Any, *, shift: int = -1, dim: int = -2, place: int = -1) -> Any:
    out = cache.roll(shift, dims=dim)
    out[:, :, torch.tensor([place], device=cache.device)] = new
    return out


def read(keys: Any, values: Any) -> Tensors:
    return torch.tanh(keys), torch.tanh(values)


def in_place(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    keys.copy_(new_keys)
    values.copy_(new_values)
    return read(keys, values)


def one_after_the_other(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k, dim=2)), values.copy_(rolled(values, v)))


def anew(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(rolled(keys, k), rolled(values, v))


@everywhere
@pytest.mark.parametrize(("code", "written"), [(in_place, WRITTEN), (one_after_the_other, WRITTEN), (anew, {})])
def test_hit(code: Callable[..., Any], written: dict[int, str], dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(code, inputs_of(BATCH, dtype=dtype), {NAME: 1}, left=2, dynamic=dynamic)
    assert dict(outcome.chosen[0].match.written) == written


def of_transformers(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    """The update of a layer whose window is full."""
    layer = StaticSlidingWindowLayer.__new__(StaticSlidingWindowLayer)
    layer.keys, layer.values, layer.device, layer.is_initialized = keys, values, keys.device, True
    layer.max_cache_len = layer.cumulative_length_int = keys.shape[2]
    return read(*layer.update(k, v))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_hit_in_transformers_own_cache(batch: int, heads: int) -> None:
    """Setting an item drops leading dimensions of one from what is set."""
    outcome = check(of_transformers, inputs_of(batch, heads), {NAME: 1}, left=2)
    assert dict(outcome.chosen[0].match.written) == WRITTEN


def test_two_layers_have_one_constant() -> None:
    def code(*values: Any) -> Tensors:
        return *of_transformers(*values[:4]), *of_transformers(*values[4:])

    check(code, [*inputs_of(), *(x + 1 for x in inputs_of())], {NAME: 2}, left=4)


def test_two_steps_of_one_layer() -> None:
    def code(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
        return *of_transformers(k, v, keys, values), *of_transformers(v, k, keys, values)

    check(code, inputs_of(), {NAME: 2}, left=4)


def test_the_old_tokens_may_be_read_before() -> None:
    def code(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
        return *read(keys, values), *in_place(k, v, keys, values)

    check(code, inputs_of(), {NAME: 1}, left=4)


def test_values_of_another_width_and_dtype() -> None:
    k, v, keys, values = inputs_of()
    check(in_place, [k, v[..., :4].to(FP32), keys, values[..., :4].to(FP32)], {NAME: 1}, left=2)


def by_two(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k, shift=-2)), values.copy_(rolled(values, v, shift=-2)))


def the_other_way(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k, shift=1)), values.copy_(rolled(values, v, shift=1)))


def other_values(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k)), values.copy_(rolled(values, v, shift=-2)))


def other_dimension(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k, dim=-1)), values.copy_(rolled(values, v, dim=-1)))


def other_place(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k, place=0)), values.copy_(rolled(values, v, place=0)))


def values_in_another_place(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k)), values.copy_(rolled(values, v, place=-2)))


def added(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    last = (torch.tensor([-1]),)
    new_keys, new_values = (x.roll(-1, dims=-2) for x in (keys, values))
    new_keys.transpose(0, 2).index_put_(last, k.transpose(0, 2), accumulate=True)
    new_values.transpose(0, 2).index_put_(last, v.transpose(0, 2), accumulate=True)
    return read(keys.copy_(new_keys), values.copy_(new_values))


def place_is_given(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    place = k[0, 0, 0, :1].abs().long()
    new_keys, new_values = (x.roll(-1, dims=-2) for x in (keys, values))
    new_keys[:, :, place], new_values[:, :, place] = k, v
    return read(keys.copy_(new_keys), values.copy_(new_values))


def keys_alone(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return read(keys.copy_(rolled(keys, k)), values + v)


def rolled_values_are_read(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new = keys.roll(-1, dims=-2)
    return torch.tanh(new), *in_place(k, v, keys, values)


def into_one_cache(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(keys, v)
    return read(keys.copy_(new_keys), keys.copy_(new_values))


@pytest.mark.parametrize(
    "code",
    [
        by_two, the_other_way, other_values, other_dimension, other_place, values_in_another_place, added,
        place_is_given, keys_alone, rolled_values_are_read,
        into_one_cache,
    ],
)  # fmt: skip
def test_near_miss(code: Callable[..., Any]) -> None:
    check(code, inputs_of(), {}, left=None)


def test_near_miss_of_two_new_tokens() -> None:
    check(of_transformers, inputs_of(tokens=2), {}, left=None)


def test_near_miss_of_one_token_for_all_heads() -> None:
    k, v, keys, values = inputs_of()
    check(in_place, [k[:, :1], v[:, :1], keys, values], {}, left=None, refused={NAME: "does not broadcast"})


def test_near_miss_of_new_tokens_in_another_dtype() -> None:
    """Which torch refuses when it runs, and a kernel would not."""
    k, v, keys, values = inputs_of()
    outcome = find_in(capture(in_place, [k.float(), v.float(), keys, values]), only=(NAME,))
    assert outcome.counts() == {}
    assert all("those of the cache torch.bfloat16" in miss.reason for miss in outcome.rejections)


def read_between(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    keys.copy_(new_keys)
    seen = torch.tanh(keys)
    values.copy_(new_values)
    return seen, *read(keys, values)


def written_between(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    keys.mul_(2.0)
    return read(keys.copy_(new_keys), values.copy_(new_values))


def a_view_is_written_between(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    values[:, :, :3].mul_(2.0)
    return read(keys.copy_(new_keys), values.copy_(new_values))


def caches_share_memory(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    one, other = keys[:, :, :8], keys[:, :, 4:12]
    new_keys, new_values = rolled(one, k), rolled(other, v)
    return read(one.copy_(new_keys), other.copy_(new_values))


def new_token_is_of_the_cache(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    return in_place(keys[:, :, :1], v, keys, values)


def half_of_it_anew(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    return read(keys.copy_(new_keys), new_values)


def crossed(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
    new_keys, new_values = rolled(keys, k), rolled(values, v)
    return read(keys.copy_(new_values), values.copy_(new_keys))


@pytest.mark.parametrize(
    "code",
    [
        read_between, written_between, a_view_is_written_between, caches_share_memory,
        new_token_is_of_the_cache, half_of_it_anew, crossed,
    ],
)  # fmt: skip
def test_near_miss_in_memory(code: Callable[..., Any]) -> None:
    """New values are taken, and written by their author."""
    (planned,) = check(code, inputs_of(), {NAME: 1}, left=None).chosen
    assert dict(planned.match.written) == {}


@pytest.mark.parametrize(
    "code", [a_view_is_written_between, read_between, caches_share_memory, new_token_is_of_the_cache]
)
def test_why_it_does_not_write_in_place(code: Callable[..., Any]) -> None:
    check(code, inputs_of(), {NAME: 1}, left=None, refused={NAME: "may see that copy_.* writes in place"})


def test_values_that_are_rolled_behind_a_write_to_the_keys() -> None:
    """Which the keys' own update must not see."""

    def code(k: Any, v: Any, keys: Any, values: Any) -> Tensors:
        new_keys = rolled(keys, k)
        keys.mul_(2.0)
        new_values = rolled(values, v)
        return read(keys.copy_(new_keys), values.copy_(new_values))

    check(code, inputs_of(), {}, left=None)
