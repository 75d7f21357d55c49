"""A real checkpoint: SmolLM2-135M-Instruct says the same, token for token, once its kernels are in."""

from __future__ import annotations

import pytest
import smollm2
import torch
from torch import nn

from tilegym_fx.apply import is_applied
from tilegym_fx.breadth.judge import usable
from tilegym_fx.inventory import load
from tilegym_fx.live import kernelize, report

TOKENS = 64
PROMPT = "The three most important inventions of the nineteenth century, and why they mattered:"
CACHES = ("dynamic", "static")


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return smollm2.load()


@pytest.fixture(scope="module")
def said(original: nn.Module) -> dict[str, torch.Tensor]:
    return {cache: greedy(original, cache) for cache in CACHES}


@pytest.fixture(scope="module")
def model(original: nn.Module, said: dict[str, torch.Tensor]) -> nn.Module:
    """The same model, once the original's tokens are known."""
    return kernelize(original, strict=True, verify=False)


def greedy(model: nn.Module, cache: str) -> torch.Tensor:
    inputs = smollm2.tokenizer()(PROMPT, return_tensors="pt")
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    with torch.no_grad():
        return model.generate(**inputs, **settings, cache_implementation=cache)[0]


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_are_the_same(model: nn.Module, said: dict[str, torch.Tensor], cache: str) -> None:
    assert len(said[cache]) >= TOKENS
    assert torch.equal(greedy(model, cache), said[cache])
    assert is_applied(model)


def test_every_layer_runs_kernels(model: nn.Module) -> None:
    layers = model.config.num_hidden_layers
    counts = report(model).counts()
    assert counts["rotary_embedding"] == layers
    assert counts["add_rms_norm"] + counts["rms_norm"] == 2 * layers + 1
    assert counts.get("silu_mul", 0) + counts.get("linear_silu_mul", 0) == layers
    assert counts["linear"] == 5 * layers + 1 + 2 * counts.get("silu_mul", 0)


def test_the_checkpoint_is_a_real_one(said: dict[str, torch.Tensor]) -> None:
    assert "invention of the light bulb" in smollm2.tokenizer().decode(said["dynamic"])


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_are_the_same_with_every_definition(
    model: nn.Module, said: dict[str, torch.Tensor], cache: str
) -> None:
    if "linear_silu_mul" not in report(model).counts():
        kernelize(model, only=usable(load()), strict=True)
    assert torch.equal(greedy(model, cache), said[cache])
