"""Counts for whole models: Llama 3.1 in full, and a few layers of every model of the shipped table."""

from __future__ import annotations

import copy
import time
from collections import Counter
from typing import Any

import pytest
import torch
from parts import PLAIN, parts
from pass_checks import INVENTORY

from tilegym_fx.cost import get_device
from tilegym_fx.export import build, export_phase, site_of
from tilegym_fx.model_source import resolve_model, shipped_models
from tilegym_fx.normalize import normalize
from tilegym_fx.pipeline import Outcome, find, matcher_for
from tilegym_fx.plan import Policy
from tilegym_fx.results import Phase

H200 = get_device("h200")
LLAMA = "meta-llama/Llama-3.1-8B"
SEQ = 2048
LAYERS = 4


def config_of(name: str, layers: int | None) -> Any:
    """The configuration of a model, with fewer layers if asked for."""
    config = copy.deepcopy(resolve_model(name).config)
    if layers is not None:
        config.num_hidden_layers = layers
        for field in ("layer_types", "mlp_layer_types"):
            if getattr(config, field, None):
                setattr(config, field, getattr(config, field)[:layers])
    return config


def outcome_of(name: str, phase: Phase, *, layers: int | None = None, only: Any = None) -> Outcome:
    model = build(config_of(name, layers), torch.bfloat16)
    graph = export_phase(model, phase, 1, SEQ).graph_module.graph
    return find(graph, INVENTORY, Policy(H200, only), site_of)


def counts(outcome: Outcome) -> dict[str, int]:
    return dict(Counter(planned.match.definition for planned in outcome.chosen))


class TestLlama:
    """Llama-3.1-8B: 32 layers at their real sizes."""

    @pytest.fixture(scope="class", params=["prefill", "decode"])
    def phase(self, request: pytest.FixtureRequest) -> Phase:
        chosen: Phase = request.param
        return chosen

    @pytest.fixture(scope="class")
    def plain(self, phase: Phase) -> Outcome:
        return outcome_of(LLAMA, phase, only=PLAIN)

    def test_counts(self, phase: Phase, plain: Outcome) -> None:
        found = counts(plain)
        linears = sum(found.get(name, 0) for name in ("linear", "linear_add"))
        attentions = sum(count for name, count in found.items() if "attention" in name)
        assert (found["rms_norm"], found["add_rms_norm"]) == (1, 64)
        assert (found["silu_mul"], found["rotary_embedding"], attentions, linears) == (32, 32, 32, 225)
        assert found.get("cache_append", 0) == (64 if phase == "decode" else 0)

    def test_nothing_is_lost_with_every_definition(self, phase: Phase, plain: Outcome) -> None:
        assert parts(counts(outcome_of(LLAMA, phase))) == parts(counts(plain))

    def test_coverage(self, plain: Outcome) -> None:
        assert plain.coverage >= 0.97


def test_matching_takes_half_a_second_and_grows_with_the_layers() -> None:
    """In seconds of this process, so that what else runs here does not matter."""
    graphs = {}
    for layers in (32, 64):
        config = config_of(LLAMA, None)
        config.num_hidden_layers = layers
        graph = export_phase(build(config, torch.bfloat16), "prefill", 1, SEQ).graph_module.graph
        normalize(graph)
        graphs[layers] = graph
    matcher = matcher_for(INVENTORY, PLAIN)
    matcher.match(graphs[32], site_of)  # traces at these sizes are kept

    def seconds(layers: int) -> float:
        start = time.process_time()
        matcher.match(graphs[layers], site_of)
        return time.process_time() - start

    times = [(seconds(32), seconds(64)) for _ in range(3)]
    assert min(short for short, _ in times) <= 0.5, times
    assert min(long / short for short, long in times) <= 2.2, times


#: Model -> parts in prefill of its first layers, and what no Definition takes (a share of time, not below).
TABLE: dict[str, tuple[dict[str, int], float]] = {}


@pytest.mark.parametrize("name", sorted(shipped_models()))
def test_every_model_of_the_table(name: str) -> None:
    wanted, coverage = TABLE[name]
    outcome = outcome_of(name, "prefill", layers=LAYERS)
    assert parts(counts(outcome)) == wanted
    assert outcome.coverage >= coverage
    assert outcome.coverage == pytest.approx(1) or outcome.uncovered


def test_the_table_is_about_the_shipped_models() -> None:
    assert TABLE.keys() == shipped_models().keys()
