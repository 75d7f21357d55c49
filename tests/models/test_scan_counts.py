"""Every model of the shipped table at its own widths: what scan finds, pinned, and derived from its configuration.

Layers repeat, so a model is captured twice with few of them, and the whole model's counts follow from the
difference. `make slow` captures every layer and holds that against the same golden file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from parts import PLAIN, parts
from pass_checks import INVENTORY
from torch.fx import Node

from tilegym_fx.cost import get_device
from tilegym_fx.export import ExportedGraph, build, export_phase, site_of
from tilegym_fx.model_source import configuration, shipped_models
from tilegym_fx.pipeline import Outcome, find
from tilegym_fx.plan import Policy
from tilegym_fx.results import Phase
from tilegym_fx.survey import op_name

PHASES: tuple[Phase, ...] = ("prefill", "decode")
SEQ = 1000  # gpt2 has 1024 positions
Counts = Mapping[Any, int]
#: One process does all with a model, whose captures are kept.
NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(name), id=name) for name in shipped_models()]

#: What one layer has, by model type; what experts have inside is a part of its own.
DENSE = {"norm": 2, "linear": 7, "gate": 1, "turned": 2, "attention": 1}
MOE = {"norm": 2, "linear": 5, "experts": 1, "router": 1, "turned": 2, "attention": 1}
PLAIN_MLP = {"norm": 2, "linear": 4, "activation": 1, "turned": 2, "attention": 1}
LAYER: dict[str, dict[str, int]] = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "phi3": {**DENSE, "linear": 4},
    "qwen3": {**DENSE, "norm": 4},
    "gemma2": {**DENSE, "norm": 4},
    "gemma3_text": {**DENSE, "norm": 6},
    "olmo2": {**DENSE, "norm": 4},
    "olmo3": {**DENSE, "norm": 4},
    "mixtral": MOE,
    "gpt_oss": MOE,
    "olmoe": {**MOE, "norm": 4},
    "qwen3_moe": {**MOE, "norm": 4},
    "deepseek_v2": {"norm": 3, "turned": 2, "linear": 8, "gate": 1, "experts": 1, "router": 1, "attention": 1},
    "gpt2": {k: v for k, v in PLAIN_MLP.items() if k != "turned"},
    "gpt_neox": PLAIN_MLP,
    "falcon": {**PLAIN_MLP, "norm": 1},
}
#: The first layers of DeepSeek have a gated MLP in the place of experts.
DENSE_LAYER = {"norm": 3, "turned": 2, "linear": 7, "gate": 1, "attention": 1}
#: Parts that any model has besides its layers.
ENDS = {"norm": 1, "linear": 1}


def expected(config: Any, phase: Phase) -> dict[str, int]:
    """The parts that a model of this configuration has."""
    layers, dense = config.num_hidden_layers, getattr(config, "first_k_dense_replace", 0)
    total: Counter[str] = Counter(ENDS)
    for parts_of_layer, count in ((LAYER[config.model_type], layers - dense), (DENSE_LAYER, dense)):
        for part, number in parts_of_layer.items():
            total[part] += number * count
    if phase == "decode":
        total["append"] = 2 * layers
    return dict(+total)


@dataclass(frozen=True)
class Found:
    """One phase of a model at one depth."""

    exported: ExportedGraph
    outcome: Outcome
    everything: Outcome

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((p.match.definition, p.match.kind) for p in self.outcome.chosen)

    @property
    def uncovered(self) -> Counter[tuple[str, str, str]]:
        """(class, reason, operation) in experts, routers and attention with compressed keys -> count."""
        nodes = [node for node, _ in self.outcome.uncovered if self._is_special(site_of(node).module_class)]
        return Counter((site_of(n).module_class, self._reason(n), op_name(n).removeprefix("aten.")) for n in nodes)

    def _is_special(self, owner: str) -> bool:
        compressed = hasattr(self.exported.model.config, "kv_lora_rank") and owner.endswith("Attention")
        return compressed or bool(re.search(r"SparseMoe|MoeBlock|MoE$|Expert|Router|TopK|Gate$", owner))

    def _reason(self, node: Node) -> str:
        match = next((p.match for p in self.everything.chosen if node in p.match.nodes), None)
        if match is not None:
            return f"{match.definition} is unverified"
        misses = [r for r in self.outcome.rejections if node in r.nodes]
        if not misses:
            return "no Definition comes near"
        nearest = max(misses, key=lambda r: (r.depth, r.definition))
        return f"no {nearest.definition}: {re.sub(r'_[0-9]+', '', nearest.reason)}"


def config_of(name: str, layers: int | None = None) -> Any:
    """The configuration of a shipped model, with fewer layers if told so."""
    fields = dict(shipped_models()[name])
    if layers is not None:
        fields["n_layer" if "n_layer" in fields else "num_hidden_layers"] = layers
        fields |= {key: value[:layers] for key, value in fields.items() if key.endswith("layer_types")}
    return configuration(fields["model_type"], fields)


def depths(name: str) -> tuple[int, int]:
    """Two numbers of layers that differ by one period, end as the whole model does, and have a layer of each kind."""
    whole = config_of(name)
    kinds = getattr(whole, "layer_types", None) or ["same"]
    period = next(p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))
    least = getattr(whole, "first_k_dense_replace", 0) + 2
    few = least + (whole.num_hidden_layers - least) % period
    while set(kinds[:few]) != set(kinds):
        few += period
    return few, few + period


@cache
def model_of(name: str, layers: int | None) -> Any:
    return build(config_of(name, layers))


@cache
def found_in(name: str, layers: int | None, phase: Phase, only: tuple[str, ...] | None = None) -> Found:
    exported = export_phase(model_of(name, layers), phase, 1, SEQ)
    graph, device = exported.graph_module.graph, get_device("h200")
    outcome = find(graph, INVENTORY, Policy(device, only), site_of)
    return Found(exported, outcome, find(graph, INVENTORY, Policy(device, list(INVENTORY.definitions)), site_of))


def whole(few: Counts, more: Counts, steps: int) -> dict[Any, int]:
    """Counts of the whole model: ``steps`` periods more than ``few`` has, of which ``more`` has one."""
    total = {key: few.get(key, 0) + steps * (more.get(key, 0) - few.get(key, 0)) for key in {**few, **more}}
    assert min(total.values(), default=0) >= 0
    return {key: count for key, count in total.items() if count}


def whole_counts(name: str, phase: Phase, of: Callable[[Found], Counts]) -> dict[Any, int]:
    few, more = depths(name)
    steps, rest = divmod(config_of(name).num_hidden_layers - few, more - few)
    assert rest == 0
    return whole(of(found_in(name, few, phase)), of(found_in(name, more, phase)), steps)


def written(counts: Counts, uncovered: Counts) -> Iterator[str]:
    """The lines of one phase in the golden file."""
    yield from (f"  {definition}: {count} {kind}" for (definition, kind), count in sorted(counts.items()))
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (owner, reason, op), count in sorted(uncovered.items()):
        groups[owner, reason].append(f"{op} {count}")
    yield from (f"  uncovered in {owner}, {reason}: {', '.join(ops)}" for (owner, reason), ops in groups.items())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NAMES)
def test_every_part_that_the_configuration_tells_of_is_found(name: str, phase: Phase) -> None:
    """With all Definitions, verified or not; whatever is fused with what."""
    layers = depths(name)[0]
    everything = found_in(name, layers, phase).everything
    found = parts(Counter(p.match.definition for p in everything.chosen))
    wanted = expected(config_of(name, layers), phase)
    assert {part: found.get(part, 0) for part in wanted} == wanted
    assert found.keys() - wanted.keys() <= {"residual add", "turned"}


@pytest.mark.parametrize("name", NAMES)
def test_counts(name: str, golden: Callable[..., None]) -> None:
    """What is used without naming anything: verified Definitions alone."""
    lines = []
    for phase in PHASES:
        counts = whole_counts(name, phase, lambda found: found.counts)
        uncovered = whole_counts(name, phase, lambda found: found.uncovered)
        lines += [phase, *written(counts, uncovered)]
    golden("scan_counts.txt", "\n".join(lines) + "\n", section=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_as_the_counts_of_a_few_tell(name: str) -> None:
    for phase in PHASES:
        found = found_in(name, None, phase)
        assert whole_counts(name, phase, lambda some: some.counts) == dict(found.counts)
        assert whole_counts(name, phase, lambda some: some.uncovered) == dict(found.uncovered)


@pytest.mark.parametrize("phase", PHASES)
def test_all_of_llama(phase: Phase) -> None:
    """32 layers, counted one by one and not from a few."""
    name = "meta-llama/Llama-3.1-8B"
    exported = export_phase(build(config_of(name)), phase)
    graph, device = exported.graph_module.graph, get_device("h200")
    outcome = find(graph, INVENTORY, Policy(device), site_of)
    found = parts(Counter(p.match.definition for p in outcome.chosen))
    assert found == {**expected(config_of(name), phase), "residual add": 64}
    assert (found["norm"], found["linear"], found["gate"], found["turned"]) == (65, 225, 32, 64)
    assert outcome.coverage >= 0.97
    plain = Counter(p.match.definition for p in find(graph, INVENTORY, Policy(device, PLAIN), site_of).chosen)
    assert (plain["add_rms_norm"], plain["rms_norm"], plain["linear"]) == (64, 1, 225)
    assert (plain["silu_mul"], plain["rotary_embedding"]) == (32, 32)
    assert plain["gqa_attention_causal" if phase == "prefill" else "gqa_attention"] == 32
