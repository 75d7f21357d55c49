"""What kernelize captures does not grow with the number of layers, and what it finds is what it would find in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reasons import unnumbered
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tilegym_fx import live, planner
from tilegym_fx.errors import ExportError, VerifyError
from tilegym_fx.live import kernelize, report
from tilegym_fx.planner import plan_source_form

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def language_model(kind: str, layers: int, **more: Any) -> Any:
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, **WIDTHS, **more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def llama(layers: int) -> Any:
    return language_model("llama", layers)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each capture of a whole model or of its inner one saw."""
    record, counts = planner.record, []

    def counted(module: Any, *call: Any) -> Any:
        inner = getattr(module, "model", module)
        if hasattr(inner, "layers"):
            counts.append(len(inner.layers))
        return record(module, *call)

    monkeypatch.setattr(planner, "record", counted)
    return counts


def test_a_deep_model_is_captured_by_its_first_layers(seen: list[int]) -> None:
    made, found = plan_source_form(llama(9))
    assert set(seen) == {3}
    assert (found.copied, found.whole) == (6, "")
    assert found.counts()["linear_silu_mul"] == 9
    assert found.counts()["cache_append"] == 18
    assert made.text.count("\nclass ") == plan_source_form(llama(3))[0].text.count("\nclass ")


DEEP: dict[str, Callable[[], Any]] = {
    "alike": lambda: llama(6),
    "in turns": lambda: language_model(
        "gemma3_text", 9, layer_types=[*["sliding_attention"] * 2, "full_attention"] * 3, sliding_window=4
    ),
    "experts after the first": lambda: language_model(
        "qwen3_moe", 6, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0]
    ),
}


@pytest.mark.parametrize("name", DEEP)
def test_the_first_layers_tell_of_all(name: str) -> None:
    model = DEEP[name]()
    (made, found), (whole, expected) = plan_source_form(model), plan_source_form(model, whole="asked for")
    assert found.copied
    assert (expected.copied, expected.whole) == (0, "asked for")
    assert made.text == whole.text
    assert found.counts() == expected.counts()
    assert unnumbered(found.misses()) == unnumbered(expected.misses())
    assert found.in_both_forms == expected.in_both_forms
    for forms in ("estimates", "graph_form"):
        for call, estimate in getattr(found, forms).items():
            other = getattr(expected, forms)[call]
            assert estimate.counts() == other.counts()
            assert estimate.coverage() == pytest.approx(other.coverage(), rel=1e-3)


def test_a_model_that_counts_its_layers_is_captured_whole(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    record = planner.record

    def demanding(module: Any, *call: Any) -> Any:
        inner = getattr(module, "model", module)
        if len(getattr(inner, "layers", range(5))) < 5:
            raise ExportError("too few layers", advice="")
        return record(module, *call)

    monkeypatch.setattr(planner, "record", demanding)
    made, found = plan_source_form(llama(5))
    assert set(seen) == {5}
    assert not found.problems
    assert "too few layers" in found.whole
    assert "every layer was captured, although many are alike: " in str(found)
    assert made.text == plan_source_form(llama(5), whole="asked for")[0].text


class Layer(nn.Module):
    """A gated layer that knows its place among the others."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.up, self.gate = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.gate(x)) * self.up(x)


class OtherAlternately(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = functional.silu if self.place % 2 else functional.relu
        return x + act(self.gate(x)) * self.up(x)


class OtherLater(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        gate = functional.silu(gate) if self.place < 4 else functional.relu(gate)
        return x + gate * self.up(x)


class GoesElsewhereLater(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place >= 4:
            return x - self.up(x)
        return x + functional.silu(self.gate(x)) * self.up(x)


class Halving(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[: -(-x.shape[0] // 2)]
        return x + functional.silu(self.gate(x)) * self.up(x)


class Deep(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(place) for place in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("layer", "why_whole"),
    [
        (Layer, ""),
        (OtherAlternately, "layers.4 does something else than layers.1"),
        (OtherLater, "layers.4 does something else than layers.1"),
        (GoesElsewhereLater, "layers.4 does something else than layers.1"),
        (Halving, "layers.3 does something else than layers.1"),
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_layers_that_only_look_alike_give_the_right_numbers(
    layer: type[Layer], why_whole: str, verify: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model, x = Deep(layer).eval(), torch.randn(64, 16)
    expected = model(x)
    kernelize(model, inputs=x, verify=verify, strict=True)
    torch.testing.assert_close(model(x), expected)
    found = report(model)
    assert why_whole in found.whole
    assert bool(found.copied) == (not why_whole)


def test_what_verification_refuses_is_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, wholes = live._apply, []

    def strict(model: Any, made: Any, *rest: Any) -> Any:
        wholes.append(len(model.layers))
        if len(wholes) == 1:
            raise VerifyError("wrong numbers")
        return apply(model, made, *rest)

    monkeypatch.setattr(live, "_apply", strict)
    model = Deep(Layer).eval()
    kernelize(model, inputs=torch.randn(4, 16), strict=True)
    assert len(wholes) == 2
    assert report(model).whole == "wrong numbers"
