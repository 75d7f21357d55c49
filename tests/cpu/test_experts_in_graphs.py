"""Routed experts in a graph that is going to run: the whole of them is one op, and what stays of them runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_compiler import fresh_compiler
from small_models import randomized, small_config
from static_steps import filled_cache, given

from tilegym_fx import last_report
from tilegym_fx.export import build


@pytest.mark.parametrize(
    ("model", "definition"),
    [
        ("Qwen/Qwen3-30B-A3B", "experts_silu"),
        ("openai/gpt-oss-20b", "experts_clamped"),
        ("deepseek-ai/DeepSeek-V2-Lite", "experts_silu_fp32"),
    ],
)
def test_a_step_has_one_op_for_a_layers_experts(model: str, definition: str) -> None:
    fresh_compiler()
    built: Any = randomized(build(small_config(model), torch.bfloat16, device="cpu"))
    step = torch.compile(built, backend="tilegym_fx", options={"inner": "eager"})
    cache = filled_cache(built, torch.arange(5)[None])
    with torch.no_grad():
        step(torch.zeros(1, 1, dtype=torch.long), **given(built, cache))
    outcome = last_report()
    assert outcome is not None
    assert outcome.counts()[definition] >= 1
    assert not outcome.counts().keys() & {"experts_rows", "grouped_linear", "experts_combine"}


@pytest.mark.parametrize("only", [[], ["silu_mul"]])
def test_a_grouped_product_that_stays_gets_the_strides_that_it_demands(only: list[str]) -> None:
    """The normal form drops the copy that gave its rows strides of whole 16 bytes."""

    def gated(x: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        rows = F.silu(x[:, :16]) * up[:, :16]
        return F.grouped_mm(rows.contiguous(), weight, offs=ends) + F.grouped_mm(
            x[:, 1:].contiguous(), weight, offs=ends
        )

    fresh_compiler()
    x, up = torch.randn(2, 6, 17, dtype=torch.bfloat16)
    weight, ends = torch.randn(2, 16, 8, dtype=torch.bfloat16), torch.tensor([4, 6], dtype=torch.int32)
    compiled = torch.compile(gated, backend="tilegym_fx", options={"inner": "eager", "only": only})
    torch.testing.assert_close(compiled(x, up, weight, ends), gated(x, up, weight, ends))
