"""Records, matches and emits a module: what kernelize does, without a policy about devices."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from torch import nn

from tilegym_fx import inventory, ops, pipeline, provenance
from tilegym_fx.emit import EmitResult, Header, emit, why_not
from tilegym_fx.normalize import normalize
from tilegym_fx.results import Match, Site


def matches_of(
    model: nn.Module, args: Any = (), kwargs: Any = None
) -> tuple[list[Match], provenance.Provenance]:
    """The largest non-overlapping Matches that can be written, else the largest ones, in graph order."""
    exported, record = provenance.record(model, args, kwargs)
    graph = copy.deepcopy(exported.graph_module).graph
    normalize(graph)
    found, _ = pipeline.matcher_for(inventory.load()).match(graph, lambda node: Site())
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
