"""Steps on transformers' own static cache: rotary embedding and cache update of every layer are one op."""

from __future__ import annotations

import copy

import pytest
import torch
from fresh_compiler import fresh_compiler
from pass_checks import assert_as_exact
from static_steps import filled_cache, given, tiny
from transformers import StaticCache

from tilegym_fx import inventory, last_report
from tilegym_fx.plan import verified

NAME = "rotary_cache_write"
LAYERS = 3
WITH_IT = (*verified(inventory.load()), NAME)


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "smollm3", "qwen3"])
def test_every_layer_has_it(model_type: str, rows: int) -> None:
    fresh_compiler()
    model = tiny(model_type, LAYERS)
    step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "only": NAME})
    assert_same_steps(model, step, rows)
    report = last_report()
    assert report is not None
    assert report.counts() == {NAME: LAYERS}


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3"])
def test_a_norm_before_the_rotation_leaves_the_update_to_a_kernel_of_its_own(model_type: str) -> None:
    fresh_compiler()
    model = tiny(model_type, LAYERS)
    names = (*WITH_IT, "cache_write")
    step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "only": names})
    assert_same_steps(model, step)
    report = last_report()
    assert report is not None
    assert report.counts()["cache_write"] == LAYERS
    assert NAME not in report.counts()


def test_beside_all_others_it_takes_the_place_of_the_rotary_embedding() -> None:
    fresh_compiler()
    model = tiny("llama", LAYERS)
    step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "only": WITH_IT})
    assert_same_steps(model, step)
    report = last_report()
    assert report is not None
    assert report.counts()[NAME] == LAYERS
    assert "rotary_embedding" not in report.counts()


def test_it_is_taken_unless_it_is_left_out() -> None:
    for skip, taken in (((), LAYERS), ((NAME,), 0)):
        fresh_compiler()
        model = tiny("llama", LAYERS)
        step = torch.compile(model, backend="tilegym_fx", options={"inner": "eager", "skip": skip})
        assert_same_steps(model, step)
        report = last_report()
        assert report is not None
        assert report.counts().get(NAME, 0) == taken
    assert report.counts()["rotary_embedding"] == LAYERS
