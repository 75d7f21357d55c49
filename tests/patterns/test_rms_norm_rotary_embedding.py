"""rms_norm_rotary_embedding and its form with one plus the weight: norm of the heads, then rotation."""

from __future__ import annotations

from functools import partial
from typing import Any

import blocks
import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

NAMES = {
    "rms_norm_rotary_embedding": blocks.rms_norm,
    "rms_norm_plus_one_rotary_embedding": blocks.rms_norm_plus_one,
}

#: With every Definition allowed: these tests are about which of them wins.
check = partial(check_pass, only=None)


def norm_first(norm: Any) -> Any:
    def code(q: Any, k: Any, qw: Any, kw: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(norm(q, qw).transpose(1, 2), norm(k, kw).transpose(1, 2), cos, sin)

    return code


def transpose_first(norm: Any) -> Any:
    def code(q: Any, k: Any, qw: Any, kw: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(norm(q.transpose(1, 2), qw), norm(k.transpose(1, 2), kw), cos, sin)

    return code


def heads(dtype: torch.dtype = BF16, width: int = 16) -> list[torch.Tensor]:
    q, k = (rand(BATCH, LENGTH, count, width, dtype=dtype) for count in (4, 2))
    weights = [rand(width, dtype=dtype, seed=i) for i in range(2)]
    return [q, k, *weights, *blocks.rotary_tables(BATCH, LENGTH, width, dtype)]


@everywhere
@pytest.mark.parametrize("form", [norm_first, transpose_first])
@pytest.mark.parametrize("name", NAMES)
def test_hit(name: str, form: Any, dtype: torch.dtype, dynamic: bool) -> None:
    check(form(NAMES[name]), heads(dtype), {name: 1}, dynamic=dynamic)


def test_near_miss_only_the_queries_are_normed() -> None:
    def code(q: Any, k: Any, qw: Any, cos: Any, sin: Any) -> Any:
        return blocks.rotary(blocks.rms_norm(q, qw).transpose(1, 2), k.transpose(1, 2), cos, sin)

    q, k, weight, _, *tables = heads()
    check(code, [q, k, weight, *tables], {"rms_norm": 1, "rotary_embedding": 1}, left=None)


def test_near_miss_the_normed_keys_are_also_returned() -> None:
    def code(q: Any, k: Any, qw: Any, kw: Any, cos: Any, sin: Any) -> Any:
        q, k = blocks.rms_norm(q, qw).transpose(1, 2), blocks.rms_norm(k, kw).transpose(1, 2)
        return (*blocks.rotary(q, k, cos, sin), k)

    check(code, heads(), {"rms_norm": 2, "rotary_embedding": 1}, left=None)


def test_near_miss_two_epsilons() -> None:
    def code(q: Any, k: Any, qw: Any, kw: Any, cos: Any, sin: Any) -> Any:
        q, k = blocks.rms_norm(q, qw, 1e-6), blocks.rms_norm(k, kw, 1e-5)
        return blocks.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    check(code, heads(), {"rms_norm": 2, "rotary_embedding": 1}, left=None)
