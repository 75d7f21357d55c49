"""gqa_attention_causal: is_causal=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from blocks import attention_inputs
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAME = "gqa_attention_causal"


def repeated(q: Any, k: Any, v: Any) -> Any:
    return blocks.attention(q, k, v, causal=True)


def shared_by_torch(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True).transpose(2, 1)


@everywhere
@pytest.mark.parametrize("code", [repeated, shared_by_torch])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (4, 4)], ids=["gqa", "mqa", "mha"])
def test_hit(code: Callable[..., Any], heads: tuple[int, int], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, attention_inputs(BATCH, LENGTH, heads, dtype), {NAME: 1}, dynamic=dynamic)


def test_the_mask_starts_at_the_first_key() -> None:
    """With more keys than queries torch aligns at the top left; so does the reference."""
    check_pass(repeated, attention_inputs(2, 3, keys=9), {NAME: 1})


def test_near_miss_not_causal() -> None:
    inputs = attention_inputs(2, 5)
    check_pass(blocks.attention, inputs, {"gqa_attention": 1}, refused={NAME: "is_causal .* is False, not True"})


def test_near_miss_a_mask_that_happens_to_be_causal() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return blocks.attention(q, k, v, mask)

    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    check_pass(code, [*attention_inputs(2, 5), mask], {"gqa_attention_masked": 1})


def test_guard_on_values_of_another_width() -> None:
    q, k, v = attention_inputs(2, 5)
    check_pass(
        repeated, [q, k, v[..., :8]], {}, left=None, refused={NAME: r"v is .*, not \[B, Hk, T, D\]"}, only=[NAME]
    )


def test_near_miss_other_dimensions_are_exchanged() -> None:
    def code(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    check_pass(code, attention_inputs(2, 5, (4, 4)), {}, left=None)


def test_dtype_of_the_inputs() -> None:
    inputs = [rand(2, 4, 5, 16, dtype=torch.float16, seed=i) for i in range(3)]
    assert check_pass(repeated, inputs, {NAME: 1}).chosen[0].match.kind == "compatible"
