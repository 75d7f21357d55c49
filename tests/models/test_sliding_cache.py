"""Steps across the end of a sliding window: transformers' static cache fills up, and then moves up with every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fresh_compiler import fresh_compiler
from pass_checks import assert_as_exact
from static_steps import given, tiny
from transformers import StaticCache

from tilegym_fx import ops, recent_reports
from tilegym_fx.ops import backends

NAME = "cache_roll_write"
LAYERS, WINDOW, STEPS = 2, 8, 9
FP32, FP64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
    yield
    ops.set_backend("auto")


def model_of(model_type: str, **changes: Any) -> torch.nn.Module:
    return tiny(model_type, LAYERS, FP32, sliding_window=WINDOW, eos_token_id=None, **changes)


def steps(model: Any, step: Any, prompt: int, batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of one step after the other, and what the caches hold at the end."""
    ids = torch.arange((prompt + STEPS) * batch).view(batch, -1) % 90
    cache = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(ids[:, :prompt], **given(model, cache))
        logits = [step(ids[:, i : i + 1], **given(model, cache)).logits for i in range(prompt, prompt + STEPS)]
    return torch.cat(logits, dim=1), [x for layer in cache.layers for x in (layer.keys, layer.values)]


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    fresh_compiler()
    return torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "only": NAME, **options})


def assert_same(model: Any, step: Any, prompt: int, batch: int) -> None:
    ours, theirs = steps(model, step, prompt, batch), steps(model, model, prompt, batch)
    wide = model.double()
    right = steps(wide, wide, prompt, batch)
    for got, want, exact in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), (right[0], *right[1]), strict=True):
        assert_as_exact(got, want, exact)


@pytest.mark.parametrize("kernels", ["torch", "interpret"])
@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma3_text"])
def test_the_window_fills_up_and_moves(model_type: str, kernels: str) -> None:
    """Two graphs write to the next place, while it is counted as a number and then as a symbol; the third one moves."""
    ops.set_backend(kernels)
    model = model_of(model_type)
    assert_same(model, compiled(model), prompt=5, batch=2)
    counts = [report.counts() for report in recent_reports()]
    assert counts[-1] == {NAME: LAYERS}
    assert not any(counts[:-1])


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("prompt", [WINDOW, WINDOW + 3])
def test_a_prompt_that_fills_the_window(prompt: int, batch: int, heads: int) -> None:
    model = model_of("mistral", num_key_value_heads=heads)
    ops.set_backend("interpret")
    assert_same(model, compiled(model), prompt, batch)
    assert {report.counts().get(NAME) for report in recent_reports()} == {LAYERS}


def test_full_attention_beside_it_keeps_its_own_update() -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = model_of("gemma3_text", layer_types=kinds)
    step = compiled(model, only=[NAME, "cache_write"])
    assert_same(model, step, prompt=WINDOW, batch=1)
    assert recent_reports()[-1].counts() == {NAME: 1, "cache_write": 1}


@pytest.mark.parametrize("only", [NAME, "silu_mul"])
def test_inductor_gets_the_same_numbers_with_it_and_without(only: str) -> None:
    """The normal form shows inductor the author's index as a constant, which must not fuse the roll with its copy."""
    model = model_of("mistral")
    assert_same(model, compiled(model, only=only, inner="inductor"), prompt=5, batch=2)


@pytest.mark.parametrize("model_type", ["mistral", "phi3"])
def test_generated_text_is_the_same_across_the_end_of_the_window(model_type: str) -> None:
    def tokens_of(model: Any) -> list[list[int]]:
        ids = torch.arange(10).view(2, 5) + 3
        text = model.generate(
            ids, max_new_tokens=12, do_sample=False, cache_implementation="static", disable_compile=True
        )
        return text.tolist()

    ops.set_backend("interpret")
    model = model_of(model_type)
    expected = tokens_of(model)
    model.forward = compiled(model.forward)
    assert tokens_of(model) == expected
    assert recent_reports()[-1].counts() == {NAME: LAYERS}
