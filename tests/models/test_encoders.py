"""Encoders and encoder-decoders come in through the same doors as causal language models: scan and kernelize."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tilegym_fx import scan
from tilegym_fx.live import kernelize, report, restore

WIDTH, LAYERS, VOCABULARY = 64, 2, 96
BERT = BertConfig(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=128, vocab_size=VOCABULARY,
    max_position_embeddings=64,
)  # fmt: skip
T5 = T5Config(
    d_model=WIDTH, num_layers=LAYERS, num_decoder_layers=LAYERS, num_heads=4, d_kv=16, d_ff=128,
    vocab_size=VOCABULARY, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
)  # fmt: skip
WHISPER = WhisperConfig(
    d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=VOCABULARY, max_source_positions=24, max_target_positions=32,
    num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def sound() -> torch.Tensor:
    return torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(0))


def padded(length: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return mask


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], dict[str, int]]] = {
    "bert": (
        lambda: BertModel(BERT),
        {"input_ids": ids(9), "attention_mask": padded(9)},
        {"gelu": LAYERS, "gqa_attention_masked": LAYERS},
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(T5),
        {"input_ids": ids(9), "attention_mask": padded(9), "decoder_input_ids": ids(5)},
        {"gelu_new": 2 * LAYERS},
    ),
    "whisper": (
        lambda: WhisperForConditionalGeneration(WHISPER),
        {"input_features": sound(), "decoder_input_ids": ids(5)},
        {"gelu": 2 * LAYERS + 2, "gqa_attention": 2 * LAYERS, "gqa_attention_causal": LAYERS},
    ),
}
NORMS = {"bert": 2 * LAYERS + 1, "t5": 5 * LAYERS + 2, "whisper": 5 * LAYERS + 2}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def first(results: Any) -> torch.Tensor:
    return results.logits if hasattr(results, "logits") else results.last_hidden_state


def test_kernelize_gives_the_same_numbers_and_restore_puts_all_back(name: str, model: nn.Module) -> None:
    _, inputs, expected = MODELS[name]
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        before = first(model(**inputs))
        kernelize(model, inputs=inputs, strict=True)
        found = report(model)
        counts = found.counts()
        after = first(model(**inputs))
        restore(model)
        again = first(model(**inputs))
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)
    assert torch.equal(again, before)
    assert [type(module) for module in model.modules()] == classes
    assert {key: counts.get(key, 0) for key in expected} == expected
    norms = sum(count for key, count in counts.items() if "norm" in key)
    assert norms == NORMS[name], str(found)


@pytest.mark.parametrize(("config", "phases"), [(BERT, ["prefill"]), (T5, ["prefill", "decode"])], ids=["bert", "t5"])
def test_scan_reads_their_configurations(
    config: Any, phases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.save_pretrained(tmp_path)
    options = [option for phase in phases for option in ("--phase", phase)]
    assert scan.main([str(tmp_path), "--json", "--seq", "16", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [phase["phase"] for phase in found["phases"]] == phases
    for phase in found["phases"]:
        assert phase["coverage_estimated"] > 0.4
        assert any("norm" in row["name"] for row in phase["definitions"])
