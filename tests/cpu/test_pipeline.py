"""The stages in order: what one broken Definition costs, what is traced for whom, and what the outcome adds up to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import INVENTORY, capture, rand

from tilegym_fx import inventory
from tilegym_fx.cost import get_device
from tilegym_fx.errors import MatchError
from tilegym_fx.facts import operations_of
from tilegym_fx.normalize import normalize
from tilegym_fx.pipeline import Outcome, find, matcher_for
from tilegym_fx.plan import Policy
from tilegym_fx.results import Plan, Site

H200 = get_device("h200")


def gate(x: Any, y: Any) -> Any:
    return torch.tanh(F.silu(x) * y)


def found(code: Any = gate, inventory: Any = INVENTORY, **policy: Any) -> Outcome:
    graph = capture(code, [rand(5, 64), rand(5, 64, seed=1)]).graph
    return find(graph, inventory, Policy(H200, **policy), lambda node: Site(node.name))


def copied(root: Path, *names: str, **changes: Any) -> inventory.Inventory:
    """An inventory of some shipped Definitions without their Solutions, the first with other fields."""
    for i, name in enumerate(names):
        fields = json.loads(INVENTORY.file_of(INVENTORY.definitions[name]).read_text())
        (root / "definitions").mkdir(exist_ok=True)
        (root / "definitions" / f"{name}.json").write_text(json.dumps({**fields, **(changes if i == 0 else {})}))
    return inventory.load(root, shipped=False)


class TestOutcome:
    def test_covered_and_uncovered_time_add_up(self) -> None:
        outcome = found(only=("silu_mul",))
        assert [p.match.definition for p in outcome.chosen] == ["silu_mul"]
        assert [str(node.target) for node, _ in outcome.uncovered] == ["aten.tanh.default"]
        assert outcome.seconds_total == pytest.approx(outcome.seconds_covered + outcome.uncovered[0][1])
        assert outcome.coverage == pytest.approx(outcome.seconds_covered / outcome.seconds_total)
        assert 0 < outcome.coverage < 1

    def test_nothing_found_is_no_coverage(self) -> None:
        assert found(only=("rms_norm",)).coverage == 0

    def test_an_empty_graph_has_none(self) -> None:
        assert Outcome(Plan((), ()), 0).coverage == 0

    def test_every_stage_is_timed(self) -> None:
        assert found(only=("silu_mul",)).seconds.keys() == {"normalize", "match", "plan"}

    def test_nodes_are_those_of_the_author(self) -> None:
        def code(x: Any, y: Any) -> Any:
            return gate(x.view(320).view(5, 64), y)

        outcome = found(code, only=("silu_mul",))
        assert outcome.nodes == 5
        assert len(outcome.chosen) == 1


class TestDefinitions:
    def test_unverified_ones_are_used_only_when_they_are_named(self, tmp_path: Path) -> None:
        tags = [t for t in INVENTORY.definitions["silu_mul"].tags if not t.startswith("status:")]
        own = copied(tmp_path, "silu_mul", "linear", tags=[*tags, "status:unverified"])
        assert {r.definition for r in found(inventory=own).rejections} == set()
        assert {r.definition for r in found(inventory=own, only=("silu_mul",)).rejections} == {"silu_mul"}

    @pytest.mark.parametrize("tell", [True, False])
    def test_where_an_unverified_one_would_fit_is_told_on_request(self, tmp_path: Path, tell: bool) -> None:
        tags = [t for t in INVENTORY.definitions["silu_mul"].tags if not t.startswith("status:")]
        own = copied(tmp_path, "silu_mul", "linear", tags=[*tags, "status:unverified"])
        graph = capture(gate, [rand(5, 64), rand(5, 64, seed=1)]).graph
        outcome = find(graph, own, Policy(H200), lambda node: Site(node.name), tell_waiting=tell)
        reasons = [(r.definition, r.reason.split(":")[0]) for r in outcome.rejections]
        assert reasons == ([("silu_mul", "it fits, but is unverified")] if tell else [])
        assert outcome.chosen == ()

    def test_one_without_a_solution_is_rejected_with_that_reason(self, tmp_path: Path) -> None:
        (rejection,) = found(inventory=copied(tmp_path, "silu_mul"), only=("silu_mul",)).rejections
        assert rejection.reason == "the inventory has no Solution for it"

    def test_an_unknown_name_is_an_error(self) -> None:
        with pytest.raises(MatchError, match="only= names 'silu_mlu'"):
            found(only=("silu_mlu",))

    def test_one_that_cannot_be_traced_costs_only_itself_and_is_told_once(self, tmp_path: Path) -> None:
        source = "# Source: https://github.com/a/b/blob/v1.0/c.py#L1-L2\n"
        broken = f"{source}def run(gate, up):\n    raise RuntimeError('broken')\n"
        names = list(INVENTORY.definitions["silu_mul"].inputs)
        own = copied(tmp_path, "silu_mul", "linear", reference=broken.replace("gate, up", ", ".join(names)))
        with pytest.warns(UserWarning, match="silu_mul is left out: .*broken"):
            matcher_for(own, own.definitions)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert matcher_for(own, own.definitions, operations=None) is matcher_for(own, own.definitions)


class TestMatchers:
    def test_one_serves_all_graphs_with_the_same_operations(self) -> None:
        graph = capture(gate, [rand(5, 64), rand(5, 64)]).graph
        normalize(graph)
        first = matcher_for(INVENTORY, ("silu_mul", "rms_norm"), operations_of(graph))
        assert first is matcher_for(INVENTORY, ("silu_mul", "rms_norm"), operations_of(graph))

    def test_forms_that_the_graph_cannot_have_are_left_out(self) -> None:
        graph = capture(gate, [rand(5, 64), rand(5, 64)]).graph
        normalize(graph)
        few = matcher_for(INVENTORY, ("silu_mul", "rms_norm"), operations_of(graph))
        assert {p.definition for p in few._patterns} == {"silu_mul"}
        every = matcher_for(INVENTORY, ("silu_mul", "rms_norm"))
        assert {p.definition for p in every._patterns} == {"silu_mul", "rms_norm"}
