"""rotary_embedding_interleaved and _fp32_shared: pairs turned by tables that have the dimension of the
heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BATCH, BF16, LENGTH, check_pass, everywhere, rand

check = partial(check_pass, only=("rotary_embedding_interleaved", "rotary_embedding_interleaved_fp32_shared"))


def inputs_of(dtype: torch.dtype, table: torch.dtype | None = None) -> list[torch.Tensor]:
    q, k = rand(BATCH, 4, LENGTH, 16, dtype=dtype), rand(BATCH, 2, LENGTH, 16, dtype=dtype)
    tables = [rand(BATCH, 1, LENGTH, 16, dtype=table or dtype, seed=i) for i in (1, 2)]
    return [q, k, *tables]


def turned(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def plain(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return (q * cos) + (turned(q) * sin), (k * cos) + (turned(k) * sin)


def wide(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    rotated = ((x.float() * cos) + (turned(x).float() * sin) for x in (q, k))
    return tuple(x.to(q.dtype) for x in rotated)


@everywhere
def test_hit(dtype: torch.dtype, dynamic: bool) -> None:
    check(plain, inputs_of(dtype), {"rotary_embedding_interleaved": 1}, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("table", [torch.float32, BF16], ids=str)
def test_hit_in_float32(table: torch.dtype, dynamic: bool) -> None:
    check(
        wide,
        inputs_of(BF16, table),
        {"rotary_embedding_interleaved_fp32_shared": 1},
        dynamic=dynamic,
    )


def test_near_miss_turned_the_other_way() -> None:
    def code(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        other = (torch.stack((x[..., 1::2], -x[..., 0::2]), dim=-1).flatten(-2) for x in (q, k))
        return tuple((x * cos) + (y * sin) for x, y in zip((q, k), other, strict=True))

    check(code, inputs_of(BF16), {}, left=None)


@pytest.mark.parametrize("code", [plain, wide])
def test_guard_on_a_table_for_each_head(code: Any) -> None:
    q, _, cos, sin = inputs_of(BF16)
    many = [table.repeat(1, 4, 1, 1) for table in (cos, sin)]
    name = "rotary_embedding_interleaved" + ("" if code is plain else "_fp32_shared")
    check(code, [q, q.flip(0), *many], {}, left=None, refused={name: r"cos is .*, not \[1 or B, One, S, D\]"})
