"""What kernelize does to a model, and what it captures for that, does not grow with the number of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tilegym_fx import live
from tilegym_fx.errors import ExportError
from tilegym_fx.live import plan_source_form

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")


def llama(layers: int) -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_a_deep_model_needs_no_more_text_or_captures_than_a_shallow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    record, counts, texts = live.record, [], []

    def counted(module: nn.Module, *call: Any) -> Any:
        captured.append(type(module).__name__)
        return record(module, *call)

    monkeypatch.setattr(live, "record", counted)
    for layers in (2, 4):
        captured: list[str] = []
        made, found = plan_source_form(llama(layers))
        assert found.counts()["cache_append"] == 2 * layers
        counts.append(captured)
        texts.append(made.text.count("\nclass "))
    assert counts[0] == counts[1]
    assert texts[0] == texts[1]


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mixed = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](x)


def test_lists_of_modules_are_whole_again_even_where_the_capture_fails() -> None:
    model = Third()
    layers = model.layers
    with live._first_of_each_list(model) as is_shorter:
        assert is_shorter
        assert [len(model.layers), len(model.mixed)] == [2, 3]
        with pytest.raises(IndexError):
            model(torch.ones(1, 8))
    with pytest.raises(ZeroDivisionError), live._first_of_each_list(model):
        raise ZeroDivisionError
    assert model.layers is layers
    with live._first_of_each_list(model.mixed) as is_shorter:
        assert not is_shorter


def test_a_model_that_cannot_do_without_its_layers_is_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    record, seen = live.record, []

    def demanding(module: nn.Module, *call: Any) -> Any:
        if type(module).__name__ == "LlamaModel":
            seen.append(len(module.layers))
            if seen[-1] < 3:
                raise ExportError("too few layers", advice="")
        return record(module, *call)

    monkeypatch.setattr(live, "record", demanding)
    made, found = plan_source_form(llama(3))
    assert seen == [2, 3, 2, 3]
    assert not found.problems
    assert "def forward" in made.text
