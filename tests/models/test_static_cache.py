"""Steps on transformers' own static cache: rotary embedding and cache update of every layer are one op."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fresh_compiler import fresh_compiler
from pass_checks import assert_as_exact
from static_steps import LATENT_HEADS, filled_cache, given, tiny
from transformers import StaticCache

from tilegym_fx import last_report

NAME = "rotary_cache_write"
LAYERS = 3
LATENT = "latent_attention_masked"


def steps(model: torch.nn.Module, step: torch.nn.Module, rows: int) -> tuple[list[torch.Tensor], StaticCache]:
    """The logits of three steps of so many tokens, and the cache that they leave."""
    cache = filled_cache(model, torch.arange(10).view(2, 5))
    ids = torch.arange(6 * rows).view(3, 2, rows) % 90
    with torch.no_grad():
        return [step(each, **given(model, cache)).logits for each in ids], cache


def assert_same_steps(model: torch.nn.Module, step: torch.nn.Module, rows: int = 1) -> None:
    runs = [steps(model, step, rows), steps(model, model, rows)]
    wide = copy.deepcopy(model).float()
    exact, wide_cache = steps(wide, wide, rows)
    for got, want, right in zip(*(logits for logits, _ in runs), exact, strict=True):
        assert_as_exact(got, want, right)
    for ours, theirs, right in zip(*(cache.layers for _, cache in runs), wide_cache.layers, strict=True):
        assert torch.equal(ours.cumulative_length, theirs.cumulative_length)
        assert_as_exact(ours.keys, theirs.keys, right.keys)
        assert_as_exact(ours.values, theirs.values, right.values)


def counts(
    model_type: str, rows: int = 1, *, changes: Mapping[str, Any] | None = None, **options: Any
) -> Mapping[str, int]:
    """What the graph of a step holds, having checked that its steps are those of the model."""
    fresh_compiler()
    model = tiny(model_type, LAYERS, **(changes or {}))
    step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", **options})
    assert_same_steps(model, step, rows)
    report = last_report()
    assert report is not None
    return report.counts()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "smollm3", "qwen3"])
def test_every_layer_has_it(model_type: str, rows: int) -> None:
    assert counts(model_type, rows, only=NAME) == {NAME: LAYERS}


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3"])
def test_a_norm_before_the_rotation_leaves_the_update_to_a_kernel_of_its_own(model_type: str) -> None:
    found = counts(model_type)
    assert found["cache_write"] == LAYERS
    assert NAME not in found


def test_beside_all_others_it_takes_the_place_of_the_rotary_embedding() -> None:
    found = counts("llama")
    assert found[NAME] == LAYERS
    assert "rotary_embedding" not in found


def test_where_it_is_left_out_the_rotary_embedding_stays() -> None:
    found = counts("llama", skip=[NAME])
    assert NAME not in found
    assert found["rotary_embedding"] == LAYERS


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_attended_to_as_they_are_cached(
    model_type: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    assert counts(model_type, rows, only=LATENT, changes=LATENT_HEADS) == {LATENT: LAYERS}


def test_where_it_is_left_out_latents_go_to_kernels_of_single_steps() -> None:
    assert counts("deepseek_v3", changes=LATENT_HEADS)[LATENT] == LAYERS
    found = counts("deepseek_v3", changes=LATENT_HEADS, skip=[LATENT])
    assert LATENT not in found
    assert found["concat_last_shared"] == found["mla_attention_masked"] == LAYERS


def test_near_miss_keys_of_their_own_are_no_latents() -> None:
    assert counts("llama", only=LATENT) == {}
