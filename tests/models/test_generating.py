"""The two ways of docs/generating_text.md give the model's own tokens, and leave no step to a graph break."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tilegym_fx


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def tokens_of(model: torch.nn.Module, **options: object) -> list[int]:
    ids = torch.arange(5, 14)[None]
    text = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static", **options)
    return text[0].tolist()


def test_a_kernelized_model_generates_on_a_static_cache(model: torch.nn.Module) -> None:
    expected = tokens_of(model)
    assert tokens_of(tilegym_fx.kernelize(model, strict=True)) == expected


def test_a_compiled_forward_generates_on_a_static_cache(model: torch.nn.Module) -> None:
    expected = tokens_of(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="tilegym_fx", options={"inner": "eager"})
    assert tokens_of(model, disable_compile=True) == expected
    report = tilegym_fx.last_report()
    assert report is not None
    assert "gqa_attention_masked" in {planned.match.definition for planned in report.chosen}
