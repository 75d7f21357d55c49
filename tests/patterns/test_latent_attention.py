"""latent_attention_masked: the steps that expand latents to keys and values before they are attended to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, BF16, FP32, LENGTH, check_pass, everywhere, rand

NAME = "latent_attention_masked"
HEADS, NOPE, TURNED, RANK, VALUES = 4, 16, 8, 32, 12
SCALE = 0.2
check = partial(check_pass, only=[NAME])


def inputs(dtype: torch.dtype, *, tokens: int = 20, turned_heads: int = 1, masks: int = 1) -> list[torch.Tensor]:
    """Queries, latents, rotated key, weight and mask."""
    return [
        rand(BATCH, LENGTH, HEADS * (NOPE + TURNED), dtype=dtype),
        rand(BATCH, 1, tokens, RANK, dtype=dtype),
        rand(BATCH, turned_heads, tokens, TURNED, dtype=dtype),
        rand(HEADS * (NOPE + VALUES), RANK, dtype=dtype),
        torch.ones(BATCH, masks, LENGTH, tokens, dtype=torch.bool).tril(tokens - LENGTH),
    ]


def queries(q: Any) -> tuple[Any, Any]:
    nope, turned = q.view(*q.shape[:2], -1, NOPE + TURNED).transpose(1, 2).split([NOPE, TURNED], -1)
    return nope, turned * 2


def filled(k: Any, turned: Any) -> Any:
    """Keys put together as transformers does it."""
    whole = k.new_empty(*k.shape[:-1], NOPE + TURNED)
    whole[..., :NOPE].copy_(k)
    whole[..., NOPE:].copy_(turned)
    return whole


def side_by_side(k: Any, turned: Any) -> Any:
    return torch.cat((k, turned), -1)


def step(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any, put: Any = filled, bias: Any = None) -> Any:
    nope, turned = queries(q)
    expanded = F.linear(latents, weight, bias)
    expanded = expanded.view(latents.shape[0], latents.shape[2], -1, NOPE + VALUES).transpose(1, 2)
    k, v = torch.split(expanded, [NOPE, VALUES], dim=-1)
    keys = put(k, k_pe.expand(-1, HEADS, -1, -1))
    out = F.scaled_dot_product_attention(torch.cat((nope, turned), -1), keys, v, attn_mask=mask, scale=SCALE)
    return out.transpose(1, 2).reshape(*q.shape[:2], -1)


@everywhere
@pytest.mark.parametrize("put", [filled, side_by_side])
def test_hit_however_the_keys_are_put_together(put: Any, dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(partial(step, put=put), inputs(dtype), {NAME: 1}, left=None, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["scale"] == SCALE


def test_hit_for_a_cache_that_the_step_has_just_written() -> None:
    def code(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
        places = torch.arange(5, 5 + LENGTH)
        latents.index_copy_(2, places, latents[:, :, :LENGTH] * 2)
        k_pe.index_copy_(2, places, k_pe[:, :, :LENGTH] * 2)
        return step(q, latents, k_pe, weight, mask)

    check(code, inputs(BF16), {NAME: 1}, left=None)


def test_hit_for_one_mask_that_is_added_for_the_whole_batch() -> None:
    *given, mask = inputs(BF16)
    added = torch.where(mask[:1], 0.0, torch.finfo(BF16).min).to(BF16)
    check(step, [*given, added], {NAME: 1}, left=None)


def values_first(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    return step(q, latents, k_pe, weight, mask, put=lambda k, turned: torch.cat((turned, k), -1))


def turned_for_queries_first(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    nope, turned = queries(q)
    expanded = F.linear(latents, weight).view(BATCH, -1, HEADS, NOPE + VALUES).transpose(1, 2)
    keys = filled(expanded[..., :NOPE], k_pe.expand(-1, HEADS, -1, -1))
    out = F.scaled_dot_product_attention(
        torch.cat((turned, nope), -1), keys, expanded[..., NOPE:], attn_mask=mask, scale=SCALE
    )
    return out.transpose(1, 2)


def values_before_keys(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    nope, turned = queries(q)
    expanded = F.linear(latents, weight).view(BATCH, -1, HEADS, NOPE + VALUES).transpose(1, 2)
    keys = filled(expanded[..., VALUES:], k_pe.expand(-1, HEADS, -1, -1))
    out = F.scaled_dot_product_attention(
        torch.cat((nope, turned), -1), keys, expanded[..., :VALUES], attn_mask=mask, scale=SCALE
    )
    return out.transpose(1, 2)


def with_a_bias(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    return step(q, latents, k_pe, weight, mask, bias=weight[:, 0])


def keys_are_kept(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    kept = []

    def put(k: Any, turned: Any) -> Any:
        kept.append(torch.cat((k, turned), -1))
        return kept[0]

    return step(q, latents, k_pe, weight, mask, put=put), kept[0] * 2


def without_a_mask(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
    return step(q, latents, k_pe, weight, None)


@pytest.mark.parametrize(
    "code",
    [values_first, turned_for_queries_first, values_before_keys, with_a_bias, keys_are_kept, without_a_mask],
)
def test_near_miss(code: Callable[..., Any]) -> None:
    check(code, inputs(FP32), {}, left=None)


def test_near_miss_the_cache_is_written_while_keys_are_put_together() -> None:
    def code(q: Any, latents: Any, k_pe: Any, weight: Any, mask: Any) -> Any:
        def put(k: Any, turned: Any) -> Any:
            keys = filled(k, turned)
            latents.add_(1)
            k_pe.add_(1)
            return keys

        return step(q, latents, k_pe, weight, mask, put=put)

    check(code, inputs(FP32), {}, left=None)


def test_near_miss_a_rotated_key_for_each_head() -> None:
    check(step, inputs(FP32, turned_heads=HEADS), {}, left=None)


def test_guard_on_a_rotated_key_of_another_dtype() -> None:
    q, latents, k_pe, weight, mask = inputs(FP32)
    given = [q, latents, k_pe.to(BF16), weight, mask]
    refused = {NAME: "q_nope is torch.float32 but k_pe is torch.bfloat16"}
    check(partial(step, put=side_by_side), given, {}, left=None, refused=refused)


def test_guard_on_a_mask_for_each_head() -> None:
    refused = {NAME: r"mask is \[3, 4, 7, 20\], not \[1 or B, One, S, T\]"}
    check(step, inputs(FP32, masks=HEADS), {}, left=None, refused=refused)
