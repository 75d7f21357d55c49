"""kernelize on every model of the shipped table, small: the same numbers, everything covered, everything put back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from parts import parts
from small_models import MODELS, small, true_config, true_widths
from torch import nn

from tilegym_fx import verify
from tilegym_fx.breadth.judge import usable
from tilegym_fx.export import build, cache_of, export_phase
from tilegym_fx.inventory import load
from tilegym_fx.live import kernelize, report, restore, wider_outputs
from tilegym_fx.model_source import resolve_model, shipped_models
from tilegym_fx.planner import plan_source_form
from tilegym_fx.survey import PHASES

STEPS = 8
EVERY = usable(load())
LLAMA = {"norm": 5, "linear": 15, "turned": 4, "attention": 2, "gate": 2}
MIXTURE = {**LLAMA, "linear": 11}

#: Model -> the parts of its layers, which all run as kernels when every Definition with a kernel is used.
PARTS: dict[str, dict[str, int]] = {
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.2-1B": LLAMA,
    "meta-llama/Llama-3.1-70B": LLAMA,
    "Qwen/Qwen2-7B": LLAMA,
    "Qwen/Qwen3-0.6B": {**LLAMA, "norm": 9},
    "Qwen/Qwen3-8B": {**LLAMA, "norm": 9},
    "Qwen/Qwen3-30B-A3B": {**MIXTURE, "norm": 9},
    "mistralai/Mistral-7B-Instruct-v0.3": LLAMA,
    "mistralai/Mixtral-8x7B-v0.1": MIXTURE,
    "microsoft/Phi-3-mini-4k-instruct": {**LLAMA, "linear": 9},
    "google/gemma-2-9b": {**LLAMA, "norm": 9},
    "google/gemma-3-4b-it (text)": {**LLAMA, "norm": 13},
    "openai/gpt-oss-20b": {k: v for k, v in MIXTURE.items() if k != "gate"},
    "deepseek-ai/DeepSeek-V2-Lite": {"norm": 7, "linear": 16, "attention": 2, "gate": 3},
    "allenai/OLMo-2-1124-7B": {**LLAMA, "norm": 9},
    "allenai/Olmo-3-1025-7B": {**LLAMA, "norm": 9},
    "allenai/OLMoE-1B-7B-0924": {**MIXTURE, "norm": 9},
    "HuggingFaceTB/SmolLM2-135M": LLAMA,
    "openai-community/gpt2": {"norm": 5, "linear": 9, "attention": 2, "activation": 2},
    "EleutherAI/pythia-1.4b": {"norm": 5, "linear": 9, "turned": 4, "attention": 2, "activation": 2},
    "tiiuae/falcon-7b": {"norm": 3, "linear": 9, "turned": 4, "attention": 2, "activation": 2},
}
#: Parts that source form may leave to the author although graph form has them: docs/limits.md says why.
LIMITS = {"residual add", "router"}
#: One model of each type; at small sizes the others of its type are the same.
TYPES = tuple({fields["model_type"]: name for name, fields in shipped_models().items()}.values())
#: Those in which Definitions find work that are used only where they are named.
BEYOND = {
    "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite",
    "allenai/OLMoE-1B-7B-0924",
}  # fmt: skip


def slow_unless(names: Collection[str], chosen: Collection[str]) -> list[Any]:
    return [pytest.param(n, marks=[] if n in chosen else pytest.mark.slow) for n in names]


def logits(model: nn.Module) -> verify.Outputs:
    """The prompt, eight cached steps, and both again for a batch padded on the left."""
    sample = verify.sample_inputs(model, batch=2)
    return verify.run_language_model(model, sample, lambda m, r: dict([cache_of(m, r)]), STEPS)


def assert_as_good(model: nn.Module, before: verify.Outputs, wide: verify.Outputs | None) -> None:
    """As near to a run in float64 as the original's logits are; of experts, which torch cannot run so, to those."""
    checks = verify.compare(before, logits(model), wide, torch.float32)
    assert len(checks) == 1 + STEPS + 1 + STEPS // 2
    assert [str(check) for check in checks if not check.passed] == []


def functions(model: nn.Module) -> list[tuple[Any, Any]]:
    return [(type(module), type(module).forward) for module in model.modules()]


def whole_parts(counts: Mapping[str, int]) -> dict[str, int]:
    return {part: count for part, count in parts(counts).items() if part not in LIMITS | {"append"}}


def assert_nothing_is_left_out(model: nn.Module, whole: Mapping[str, int]) -> None:
    """In each call what the graph form takes over the source form takes over too, up to its limits.

    A graph may compute a norm once more for a linear that has it built in, so ``whole`` is the most that counts.
    """
    made = report(model)
    assert set(made.estimates) == {"prefill", "decode"}, made.problems
    for call, estimate in made.estimates.items():
        here, anywhere = whole_parts(estimate.counts()), whole_parts(made.graph_form[call].counts())
        assert {part: here.get(part, 0) for part in anywhere} == {
            part: min(anywhere[part], whole[part]) for part in anywhere
        }
        appended = [counts.get("cache_append", 0) for counts in (estimate.counts(), made.graph_form[call].counts())]
        assert appended[0] == appended[1], "a cache's append is written"


def test_the_table_is_the_shipped_one() -> None:
    assert set(PARTS) == set(MODELS)


@pytest.mark.parametrize("name", slow_unless(MODELS, TYPES))
def test_with_the_definitions_that_are_used_by_themselves(name: str) -> None:
    model = small(name)
    before, wide, original = logits(model), wider_outputs(model, logits), functions(model)
    assert kernelize(model, strict=True) is model
    assert report(model).checks
    assert_as_good(model, before, wide)
    assert_nothing_is_left_out(model, PARTS[name])
    restore(model)
    assert functions(model) == original


@pytest.mark.parametrize("name", slow_unless(TYPES, BEYOND))
def test_with_every_definition_that_has_a_kernel(name: str) -> None:
    model = small(name)
    before, wide, original = logits(model), wider_outputs(model, logits), functions(model)
    kernelize(model, strict=True, only=EVERY, verify=False)
    assert_as_good(model, before, wide)
    assert_nothing_is_left_out(model, PARTS[name])
    for estimate in report(model).estimates.values():
        assert whole_parts(estimate.counts()) == PARTS[name]
    assert all(torch.equal(logits(restore(model))[call][0], before[call][0]) for call in before)
    assert functions(model) == original


#: Models that are run at their own widths.
WIDE = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "google/gemma-3-4b-it (text)", "openai/gpt-oss-20b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(WIDE)]
)
def test_two_layers_of_true_width(name: str) -> None:
    model = true_widths(name)
    before, wide = logits(model), wider_outputs(model, logits)
    kernelize(model, strict=True, only=EVERY, verify=False)
    assert_as_good(model, before, wide)
    for estimate in report(model).estimates.values():
        assert whole_parts(estimate.counts()) == PARTS[name]
    assert_nothing_is_left_out(model, PARTS[name])


@pytest.mark.slow
def test_experts_pay_off_at_true_width() -> None:
    """In bfloat16: a capture of experts in float32 has an operation of transformers' own in torch's place."""
    name = "openai/gpt-oss-20b"
    _, made = plan_source_form(build(true_config(name)), only=EVERY)
    for estimate in made.estimates.values():
        assert whole_parts(estimate.counts()) == {**PARTS[name], "experts": 2}


@pytest.mark.slow
def test_all_of_it_costs_at_most_three_exports() -> None:
    """The 32 layers of Llama-3.1-8B on meta, both calls of generate, patterns traced before."""
    model = build(resolve_model("meta-llama/Llama-3.1-8B").config)

    def export() -> None:
        for phase in PHASES:
            export_phase(model, phase, 2, 256)

    kernelize(model)
    exported, whole = ([seconds(step) for _ in range(3)] for step in (export, lambda: kernelize(model)))
    assert sum(whole) <= 3 * sum(exported), (exported, whole)


def seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start
