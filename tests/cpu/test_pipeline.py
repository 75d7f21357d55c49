"""The stages in order: what an Outcome holds, and what is kept between graphs."""

from __future__ import annotations

from typing import Any

import blocks
import pytest
import torch
from inventory_roots import write_repository
from pass_checks import INVENTORY, capture, rand

from tilegym_fx.cost import get_device
from tilegym_fx.inventory import load
from tilegym_fx.pipeline import find, matcher_for
from tilegym_fx.plan import Policy
from tilegym_fx.results import Frame, Site

POLICY = Policy(get_device("h200"), only=["rms_norm"])


def mixed(x: Any, w: Any) -> Any:
    return blocks.rms_norm(x, w).cumsum(-1)


def outcome_of(code: Any = mixed, site_of: Any = lambda node: Site()) -> Any:
    return find(capture(code, [rand(5, 64), rand(64)]).graph, INVENTORY, POLICY, site_of)


def test_an_outcome_adds_up() -> None:
    outcome = outcome_of()
    assert [p.match.definition for p in outcome.chosen] == ["rms_norm"]
    assert [str(node.target) for node, _ in outcome.uncovered] == ["aten.cumsum.default"]
    assert outcome.seconds_total == outcome.seconds_covered + sum(s for _, s in outcome.uncovered)
    assert outcome.coverage == outcome.seconds_covered / outcome.seconds_total
    assert 0 < outcome.coverage < 1


def test_nodes_are_those_of_the_author() -> None:
    graph_module = capture(mixed, [rand(5, 64), rand(64)])
    calls = sum(node.op == "call_function" for node in graph_module.graph.nodes)
    assert find(graph_module.graph, INVENTORY, POLICY, lambda node: Site()).nodes == calls


def test_every_stage_is_timed() -> None:
    seconds = outcome_of().seconds
    assert list(seconds) == ["normalize", "match", "plan"]
    assert all(s >= 0 for s in seconds.values())


def test_a_graph_without_any_call() -> None:
    outcome = outcome_of(lambda x, w: x)
    assert (outcome.nodes, outcome.chosen, outcome.coverage) == (0, (), 0.0)


def test_sites_come_from_the_caller() -> None:
    site = Site("model.norm", "Norm", (Frame("model.py", 3, "forward"),))
    outcome = outcome_of(site_of=lambda node: site)
    assert outcome.chosen[0].match.site == site
    assert str(site) == "model.norm (Norm) model.py:3"


def test_the_matcher_of_an_inventory_is_made_once() -> None:
    assert matcher_for(INVENTORY, ["rms_norm"]) is matcher_for(INVENTORY, ["rms_norm"])
    assert matcher_for(INVENTORY, ["rms_norm"]) is not matcher_for(INVENTORY, ["silu_mul"])


def test_a_definition_that_cannot_be_traced_costs_only_itself(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = load(write_repository(tmp_path), shipped=False)

    def broken(name: str) -> Any:
        raise ValueError("no such size")

    monkeypatch.setattr(inventory, "reference", lambda name: broken)
    with pytest.warns(UserWarning, match="scaled is left out: scaled"):
        matcher = matcher_for(inventory, ["scaled"])
    assert matcher.match(capture(mixed, [rand(5, 64), rand(64)]).graph, lambda node: Site())[0] == []


def test_a_users_own_inventory_is_searched(tmp_path: Any) -> None:
    inventory = load(write_repository(tmp_path), shipped=False)
    graph = capture(lambda x: x * 3.5, [rand(5, 64)]).graph
    outcome = find(graph, inventory, Policy(get_device("h200"), only=["scaled"]), lambda node: Site())
    assert [(p.match.definition, p.match.inputs["scale"], p.solution) for p in outcome.chosen] == [
        ("scaled", 3.5, "scaled")
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_layouts_are_kept_on_request(keep: bool) -> None:
    graph = capture(lambda x: x.t().contiguous() * 2, [rand(5, 64)]).graph
    find(graph, INVENTORY, POLICY, lambda node: Site(), keep_layouts=keep)
    kept = graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)
    assert bool(kept) == keep


def test_the_record_is_frozen() -> None:
    outcome = outcome_of()
    with pytest.raises(AttributeError):
        outcome.nodes = 3
