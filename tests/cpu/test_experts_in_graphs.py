"""Routed experts in a graph that is going to run: the whole of them is one op, and what stays of them runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
