"""Attention with sinks, with capped scores, and with values of their own width."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import repeat_kv
from pass_checks import BATCH, FP32, LENGTH, check_pass, everywhere, rand

check = partial(check_pass, only=(
    "sink_attention_masked", "sink_attention_step", "softcap_attention_masked", "gqa_attention",
    "mla_attention", "mla_attention_causal", "mla_attention_masked",
))  # fmt: skip

SCALE = 0.25


def heads(dtype: torch.dtype, values: int = 16, batch: int = BATCH, queries: int = LENGTH) -> list[torch.Tensor]:
    sizes = ((batch, 4, queries, 16), (batch, 2, LENGTH, 16), (batch, 2, LENGTH, values))
    return [rand(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


def causal(dtype: torch.dtype, queries: int = LENGTH) -> torch.Tensor:
    return torch.full((1, 1, queries, LENGTH), torch.finfo(dtype).min, dtype=dtype).triu(LENGTH - queries + 1)


def with_sink(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE + mask
    sink = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, sink], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(weights, repeat_kv(v, 2)).transpose(1, 2).contiguous()


def with_sink_as_factor(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE + mask
    factor = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(weights, repeat_kv(v, 2)) * factor.unsqueeze(-1).to(q.dtype)
    return out.transpose(1, 2).contiguous()


def with_cap(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE
    scores = torch.tanh(scores / 5.0) * 5.0 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v, 2)).transpose(1, 2).contiguous()


@everywhere
@pytest.mark.parametrize("code", [with_sink, with_sink_as_factor])
def test_sink_hit(code: Any, dtype: torch.dtype, dynamic: bool) -> None:
    inputs = [*heads(dtype), causal(dtype), rand(4, dtype=dtype)]
    check(code, inputs, {"sink_attention_masked": 1}, dynamic=dynamic)


def test_sink_hit_in_a_step_of_one_sequence() -> None:
    inputs = [*heads(FP32, batch=1, queries=1), causal(FP32, 1), rand(4, dtype=FP32)]
    check(with_sink, inputs, {"sink_attention_step": 1})


@everywhere
def test_softcap_hit(dtype: torch.dtype, dynamic: bool) -> None:
    outcome = check(with_cap, [*heads(dtype), causal(dtype)], {"softcap_attention_masked": 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["softcap"] == 5.0


def test_softcap_near_miss_divided_and_multiplied_by_different_numbers() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.tanh(torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE / 5.0) * 4.0 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, repeat_kv(v, 2)).transpose(1, 2)

    check(code, [*heads(FP32), causal(FP32)], {}, left=None)


def test_sink_near_miss_the_sink_keeps_its_weight() -> None:
    def code(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE + mask
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., 1:]
        return torch.matmul(weights, repeat_kv(v, 2)).transpose(1, 2)

    check(code, [*heads(FP32), causal(FP32), rand(4, dtype=FP32)], {}, left=None)


@pytest.mark.parametrize("code", [with_sink, with_cap])
def test_guard_on_a_mask_for_each_head(code: Any) -> None:
    extra = [rand(4, dtype=FP32)] if code is with_sink else []
    name = "sink_attention_masked" if extra else "softcap_attention_masked"
    inputs = [*heads(FP32), causal(FP32).repeat(1, 4, 1, 1), *extra]
    check(code, inputs, {}, left=None, refused={name: r"mask is .*, not \[1 or B, One, S, T\]"})


def wide(*, causal: bool = False, masked: bool = False, gqa: bool = False) -> Any:
    def code(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        options = {"is_causal": causal, "attn_mask": mask[0] if masked else None, "scale": SCALE}
        if gqa:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), **options).transpose(1, 2)

    return code


@everywhere
@pytest.mark.parametrize("gqa", [False, True], ids=["repeated", "shared"])
def test_value_width_hit(gqa: bool, dtype: torch.dtype, dynamic: bool) -> None:
    inputs = heads(dtype, values=24)
    for name, code, mask in (
        ("mla_attention", wide(gqa=gqa), []),
        ("mla_attention_causal", wide(gqa=gqa, causal=True), []),
        ("mla_attention_masked", wide(gqa=gqa, masked=True), [causal(dtype)]),
    ):
        check(code, [*inputs, *mask], {name: 1}, dynamic=dynamic)


def test_value_width_guard_on_values_as_wide_as_keys() -> None:
    check(wide(), heads(FP32), {"gqa_attention": 1}, refused={"mla_attention": "grouped-query attention"})
