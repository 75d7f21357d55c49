"""Mixtures of experts in bfloat16, place by place: every kernel as it is called in a model, and planted wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_kernels import Planter
from routed import rounded_otherwise
from small_models import small

from tilegym_fx import kernelize, report, verify
from tilegym_fx.errors import VerifyError
from tilegym_fx.export import cache_of
from tilegym_fx.places import Places

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
ROUTED = (
    "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite",
    *(pytest.param(name, marks=pytest.mark.slow) for name in
      ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "allenai/OLMoE-1B-7B-0924")),
)  # fmt: skip


@pytest.mark.parametrize("name", ROUTED)
def test_every_kernel_of_a_mixture_is_right_wherever_it_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    model = kernelize(small(name, torch.bfloat16), verify=False, strict=True)
    places = Places(model)
    verify.run_language_model(
        model, verify.sample_inputs(model, batch=2), lambda m, r: dict([cache_of(m, r)]), 1, around=places.call
    )
    assert report(model).chooses
    assert set(places.seen) == set(report(model).counts())


def two_roundings(found: Any) -> Any:
    """A right kernel, of which not every rounding is the reference's."""
    if isinstance(found, torch.Tensor):
        return rounded_otherwise(found)
    return tuple(rounded_otherwise(value) for value in found)


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "experts": ("experts_clamped", lambda value: value * 1.05),
    "router": ("router_topk_softmax", lambda found: (found[0], (found[1] + 1) % 8)),
    "attention": ("sink_attention_masked", lambda value: value * 1.05),
    "residual": ("add_rms_norm_cast_last", lambda found: (found[0], found[1] * 0.95)),
}


def is_judged(seed: int) -> str:
    torch.manual_seed(seed)
    model = small("openai/gpt-oss-20b", torch.bfloat16)
    return report(kernelize(model, strict=True)).judged_by_places


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Planter:
    planter = Planter(monkeypatch)
    planter.changed("add_rms_norm_cast_last", two_roundings)
    return planter


def test_a_right_mixture_is_kept_when_a_rounding_turns_a_choice(plant: Planter) -> None:
    judged = [is_judged(seed) for seed in range(4)]
    assert any(judged)


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_mixture_with_a_wrong_kernel_is_refused(plant: Planter, name: str, change: Callable[[Any], Any]) -> None:
    plant.changed(name, change)
    with pytest.raises(VerifyError, match="GptOssForCausalLM with"):
        is_judged(0)
