"""Records, matches and emits a module: what kernelize does, without a policy about devices."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from torch import nn

from tilegym_fx import inventory, ops, pipeline, provenance
from tilegym_fx.emit import Header, emit, why_not
from tilegym_fx.normalize import normalize
from tilegym_fx.results import EmitResult, Match, Site

#: The Definitions that these tests speak of; a new one, that computes more at once, does not change them.
BASIC = frozenset({
    "add_layer_norm", "add_rms_norm", "add_rms_norm_cast_last", "add_rms_norm_plus_one", "gelu_mul", "gelu_new",
    "gelu_tanh_mul", "gqa_attention", "gqa_attention_causal", "gqa_attention_masked", "layer_norm", "linear",
    "linear_add", "linear_bias", "rms_norm", "rms_norm_add", "rms_norm_cast_last", "rms_norm_cast_last_add",
    "rms_norm_plus_one", "rms_norm_plus_one_add",
    "rotary_embedding", "rotary_embedding_fp32", "silu_mul", "silu_mul_packed",
})  # fmt: skip


def matches_of(model: nn.Module, args: Any = (), kwargs: Any = None) -> tuple[list[Match], provenance.Provenance]:
    """The largest non-overlapping Matches that can be written, else the largest ones, in graph order."""
    exported, record = provenance.record(model, args, kwargs)
    graph = copy.deepcopy(exported.graph_module).graph
    normalize(graph)
    found, _ = pipeline.matcher_for(inventory.load()).match(graph, lambda node: Site())
    found = [match for match in found if match.definition in BASIC]
    position = {node: i for i, node in enumerate(graph.nodes)}
    chosen: list[Match] = []
    taken: set[Any] = set()
    for wanted in (True, False):
        for match in sorted(found, key=lambda m: (-len(m.nodes), m.definition, position[m.nodes[-1]])):
            if taken.isdisjoint(match.nodes) and (why_not(match, record) is None) == wanted:
                taken.update(match.nodes)
                chosen.append(match)
    return sorted(chosen, key=lambda m: position[m.nodes[-1]]), record


def emitted(model: nn.Module, args: Any = (), kwargs: Any = None, *more: dict[str, Any]) -> EmitResult:
    """The emitted text for one capture, or for several when further keyword inputs are given."""
    ops.register(inventory.load())
    matches, record = matches_of(model, args, kwargs)
    captures = [matches_of(model, (), inputs) for inputs in more]
    return emit(matches, record, model, header=Header.of(model), more=captures)


def counts(result: EmitResult) -> dict[str, int]:
    return dict(Counter(written.match.definition for written in result.written))


def method(result: EmitResult, cls: str) -> str:
    """The text of one emitted class."""
    start = result.text.index(f"class {cls}(")
    return result.text[start:].split("\n\n\n")[0]
