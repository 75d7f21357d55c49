"""gated_delta_step and delta_decay: as models write them, and what comes near."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, FP32, LENGTH, check_pass, everywhere, rand

NAMES = ("gated_delta_step", "delta_decay")
VALUES, WIDE = 4, 10
check = partial(check_pass, only=NAMES, left=None)


def unit(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def step(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *, normed: Any = unit, axis: int = -2, kept: bool = True
) -> Any:
    shared = v.shape[2] // k.shape[2]
    if shared > 1:
        q, k = q.repeat_interleave(shared, dim=2), k.repeat_interleave(shared, dim=2)
    q, k, v, beta, g = (
        x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format) for x in (q, k, v, beta, g)
    )
    q, k = normed(q), normed(k)
    q = q / (q.shape[-1] ** 0.5)
    last, output = state.to(v), torch.zeros_like(v)
    q_t, k_t, v_t = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    last = last * g[:, :, 0].exp()[..., None, None]
    known = (last * k_t.unsqueeze(-1)).sum(dim=axis)
    delta = ((v_t - known) if kept else (v_t + known)) * beta[:, :, 0].unsqueeze(-1)
    last = last + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
    output[:, :, 0] = (last * q_t.unsqueeze(-1)).sum(dim=-2)
    return output.transpose(1, 2).to(torch.bfloat16), last


def position(width: int = 12, keys: int = 2, values: int = WIDE) -> list[torch.Tensor]:
    return [
        rand(2, 1, keys, width), rand(2, 1, keys, width, seed=1), rand(2, 1, VALUES, values),
        -rand(2, 1, VALUES, dtype=FP32).abs(), rand(2, 1, VALUES).sigmoid(), rand(2, VALUES, width, values, dtype=FP32),
    ]  # fmt: skip


@pytest.mark.parametrize("keys", [2, VALUES], ids=["shared", "own"])
@pytest.mark.parametrize("width", [12, 16], ids=["root", "power of two"])
def test_one_position(width: int, keys: int) -> None:
    outcome = check(step, position(width, keys), {"gated_delta_step": 1})
    assert outcome.chosen[0].match.inputs["eps"] == 1e-6


def test_near_miss_keys_of_any_length() -> None:
    check(partial(step, normed=lambda x: x), position(), {})


def test_near_miss_what_is_known_is_added() -> None:
    check(partial(step, kept=False), position(), {})


def test_near_miss_states_read_along_the_values() -> None:
    check(partial(step, axis=-1), position(values=12), {})


@everywhere
def test_decay(dtype: torch.dtype, dynamic: bool) -> None:
    code = lambda a, rate, bias: -rate.float().exp() * F.softplus(a.float() + bias)  # noqa: E731
    inputs = [rand(BATCH, LENGTH, 6, dtype=dtype), rand(6, dtype=dtype), rand(6, dtype=dtype, seed=1)]
    check(code, inputs, {"delta_decay": 1}, dynamic=dynamic, left=0)


def test_near_miss_another_activation() -> None:
    code = lambda a, rate, bias: -rate.float().exp() * F.relu(a.float() + bias)  # noqa: E731
    check(code, [rand(2, 5, 6), rand(6), rand(6, seed=1)], {})


def test_near_miss_states_that_grow() -> None:
    code = lambda a, rate, bias: rate.float().exp() * F.softplus(a.float() + bias)  # noqa: E731
    check(code, [rand(2, 5, 6), rand(6), rand(6, seed=1)], {})
