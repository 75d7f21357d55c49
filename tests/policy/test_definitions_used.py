"""The inventory holds no Definition for one model type alone, unless a shipped model has it, and none that never wins.

Which plans chose a Definition is read from `docs/coverage.json`, what `python -m tilegym_fx.scan --all` wrote.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from static_steps import LATENT_HEADS, step_on_a_static_cache

from tilegym_fx.cost import get_device
from tilegym_fx.export import build, export_phase, site_of
from tilegym_fx.inventory import load
from tilegym_fx.model_source import configuration, shipped_models
from tilegym_fx.pipeline import find
from tilegym_fx.plan import Policy

COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.json"
KERNELS = sorted(name for name, d in load().definitions.items() if "status:draft" not in d.tags)
SHIPPED = {str(fields["model_type"]) for fields in shipped_models().values()}
#: Definitions that no default configuration has -> fields of a llama that has it.
NOT_BY_DEFAULT: dict[str, dict[str, Any]] = {
    "rotary_table_scaled": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
}


def types_by_definition() -> dict[str, set[str]]:
    """Definition -> the model types with a place for which a plan chose it."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in json.loads(COVERAGE.read_text(encoding="utf-8"))["rows"]:
        for name in row["definitions"]:
            found[name].add(row["model_type"])
    return found


USED = types_by_definition()


#: Definitions that no export of a growing cache has -> model types that have it where the cache is static.
WITH_A_STATIC_CACHE = {
    "rotary_cache_write": ("llama", "qwen3"), "cache_write": ("gemma3_text", "llama"),
    "cache_roll_write": ("gemma3_text", "phi3"), "latent_attention_masked": ("deepseek_v2", "deepseek_v3"),
}  # fmt: skip
#: Fields of those models: a window whose cache the step finds full, heads of latent attention.
FIELDS: dict[str, dict[str, Any]] = {
    "cache_roll_write": {"sliding_window": 4}, "latent_attention_masked": LATENT_HEADS,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(KERNELS) - set(NOT_BY_DEFAULT) - set(WITH_A_STATIC_CACHE)))
def test_two_model_types_or_a_shipped_model_use_it(name: str) -> None:
    types = USED[name]
    assert len(types) >= 2 or types & SHIPPED, f"{name} is chosen for {sorted(types) or 'no model type'}"


@pytest.mark.parametrize("name", NOT_BY_DEFAULT)
def test_another_configuration_of_any_model_uses_it(name: str) -> None:
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = build(configuration("llama", {**tiny, "vocab_size": 96, **NOT_BY_DEFAULT[name]}))
    graph = export_phase(model, "prefill", 1, 32).graph_module.graph
    outcome = find(graph, load(), Policy(get_device("h200"), KERNELS), site_of)
    assert name in {planned.match.definition for planned in outcome.chosen}


@pytest.mark.parametrize(
    ("name", "model_type"), [(name, kind) for name, kinds in WITH_A_STATIC_CACHE.items() for kind in kinds]
)
def test_a_static_cache_uses_it(name: str, model_type: str) -> None:
    outcome = step_on_a_static_cache(model_type, layers=2, only=(name,), **FIELDS.get(name, {}))
    assert outcome.counts() == {name: 2}


def test_the_coverage_data_speak_of_this_inventory() -> None:
    strangers = set(USED) - set(load().definitions)
    assert not strangers, f"docs/coverage.json names {sorted(strangers)}; run `python -m tilegym_fx.scan --all` again"
