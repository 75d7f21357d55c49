"""One step of generation on a static cache, as `torch.compile(backend="tilegym_fx")` sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fresh_compiler import fresh_compiler
from torch import nn
from transformers import StaticCache

from tilegym_fx import last_report
from tilegym_fx.export import build
from tilegym_fx.export.caches import cache_name
from tilegym_fx.model_source import configuration
from tilegym_fx.pipeline import Outcome

HELD = 24
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 96, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
#: Heads as in multi-head latent attention, of widths that all differ, and no experts in three layers.
LATENT_HEADS = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 3,
}  # fmt: skip


def tiny(model_type: str, layers: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """A model of random weights."""
    torch.manual_seed(0)
    return build(configuration(model_type, {**TINY, "num_hidden_layers": layers, **changes}), dtype, device="cpu")


def filled_cache(model: Any, prompt: torch.Tensor) -> StaticCache:
    """A static cache after a prompt."""
    cache = StaticCache(config=model.config, max_cache_len=HELD)
    with torch.no_grad():
        model(prompt, **given(model, cache))
    return cache


def given(model: nn.Module, cache: StaticCache) -> dict[str, StaticCache]:
    """The cache as an argument: models call it by several names."""
    name = cache_name(model)
    assert name is not None
    return {name: cache}


def step_on_a_static_cache(model_type: str, layers: int, only: Sequence[str], **changes: Any) -> Outcome:
    """What the backend finds in the step after a prompt of five tokens."""
    fresh_compiler()
    model = tiny(model_type, layers, **changes)
    step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "only": only})
    cache = filled_cache(model, torch.arange(5)[None])
    with torch.no_grad():
        step(torch.zeros(1, 1, dtype=torch.long), **given(model, cache))
    outcome = last_report()
    assert outcome is not None
    return outcome
