"""Which matches are taken: overlaps, Solutions, what a user or the source form refuses, and cycles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import BF16, FP32, INVENTORY, capture, rand

from tilegym_fx import inventory
from tilegym_fx.cost import get_device
from tilegym_fx.errors import MatchError
from tilegym_fx.normalize import normalize
from tilegym_fx.pipeline import matcher_for
from tilegym_fx.plan import Policy, choose_solution, considered, plan
from tilegym_fx.results import Match, Plan, Site

NAMES = ("rms_norm", "add_rms_norm", "silu_mul", "linear", "linear_add")
H200 = get_device("h200")


def planned(
    code: Callable[..., Any], *inputs: Any, names: tuple[str, ...] = NAMES, where: Any = INVENTORY, **policy: Any
) -> Plan:
    graph = capture(code, inputs).graph
    normalize(graph)
    matches, misses = matcher_for(INVENTORY, names).match(graph, lambda node: Site(node.name))
    return plan(graph, matches, misses, where, Policy(policy.pop("device", H200), **policy))


def taken(found: Plan) -> dict[str, int]:
    return dict(Counter(p.match.definition for p in found.chosen))


def reasons(found: Plan, definition: str) -> list[str]:
    return [r.reason for r in found.rejections if r.definition == definition]


def add_norm(x: Any, y: Any, w: Any) -> Any:
    total = x + y
    return total, blocks.rms_norm(total, w)


ADD_NORM = (rand(64, 512), rand(64, 512, seed=1), rand(512))


class TestOverlaps:
    def test_what_saves_more_is_taken_and_the_loser_says_who_won(self) -> None:
        found = planned(add_norm, *ADD_NORM)
        assert taken(found) == {"add_rms_norm": 1}
        assert reasons(found, "rms_norm") == ["overlaps add_rms_norm, which saves more"]

    def test_what_does_not_overlap_is_taken_beside(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            return F.silu(blocks.rms_norm(x, w)) * y

        assert taken(planned(code, *ADD_NORM)) == {"rms_norm": 1, "silu_mul": 1}

    def test_a_loser_gets_its_place_when_the_winner_is_left_out(self) -> None:
        found = planned(add_norm, *ADD_NORM, skip=("add_rms_norm",))
        assert taken(found) == {"rms_norm": 1}
        assert reasons(found, "add_rms_norm") == ["left out by only= or skip="]

    def test_chosen_ones_are_in_graph_order(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            return blocks.rms_norm(F.silu(x) * y, w)

        assert [p.match.definition for p in planned(code, *ADD_NORM).chosen] == ["silu_mul", "rms_norm"]

    @pytest.mark.parametrize("norms", [1, 2])
    def test_several_together_displace_what_saves_more_than_each(self, norms: int) -> None:
        """A norm fused with the addition before it would keep that addition from a rotary embedding."""

        def code(q: Any, k: Any, cos: Any, sin: Any, w: Any) -> Any:
            q, k = blocks.rotary(q, k, cos, sin)
            return blocks.rms_norm(q, w) if norms == 2 else q, blocks.rms_norm(k, w)

        heads, table = [rand(1, 32, 1024, 128, seed=seed) for seed in (0, 1)], rand(1, 1024, 128)
        found = planned(
            code, *heads, table, table + 1, rand(128), names=("rms_norm", "add_rms_norm", "rotary_embedding")
        )
        assert taken(found) == {"rotary_embedding": 1, "rms_norm": norms}
        why = "overlaps rotary_embedding, which saves more with what fits beside it"
        assert reasons(found, "add_rms_norm") == [why] * norms

    def test_an_addition_that_is_part_of_nothing_else_stays_in_the_norm(self) -> None:
        found = planned(add_norm, *ADD_NORM, names=("rms_norm", "add_rms_norm", "rotary_embedding"))
        assert taken(found) == {"add_rms_norm": 1}

    @pytest.mark.parametrize("crossed", [True, False], ids=["crossed", "beside"])
    def test_no_two_wait_for_each_other(self, crossed: bool) -> None:
        """Regions that are whole in themselves and feed each other: one goes."""
        graph = torch.fx.Graph()
        x, y = (_value(graph.placeholder(name)) for name in "xy")
        first, second = (_value(graph.call_function(torch.ops.aten.tanh.default, (v,))) for v in (x, y))
        sources = (second, first) if crossed else (first, second)
        last = [_value(graph.call_function(torch.ops.aten.tanh.default, (v,))) for v in sources]
        graph.output(tuple(last))
        matches = [
            Match("silu_mul", "reference", "exact", {"gate": v}, (a, b), (a, b))
            for v, a, b in zip((x, y), (first, second), last, strict=True)
        ]
        found = plan(graph, matches, (), INVENTORY, Policy(H200))
        assert len(found.chosen) == (1 if crossed else 2)
        waiting = ["it and another region would need each other's result"] if crossed else []
        assert [r.reason for r in found.rejections] == waiting


def _value(node: torch.fx.Node) -> torch.fx.Node:
    node.meta["val"] = torch.empty(64, 512, dtype=BF16, device="meta")
    return node


class TestPolicy:
    def test_only_limits(self) -> None:
        assert taken(planned(add_norm, *ADD_NORM, only=("rms_norm",))) == {"rms_norm": 1}

    def test_one_name_is_no_collection_of_letters(self) -> None:
        assert taken(planned(add_norm, *ADD_NORM, only="rms_norm")) == {"rms_norm": 1}
        assert taken(planned(add_norm, *ADD_NORM, skip="add_rms_norm")) == {"rms_norm": 1}
        assert not Policy(H200, only="add_rms_norm").allows("rms_norm")

    @pytest.mark.parametrize("option", ["only", "skip"])
    def test_an_unknown_name_is_an_error(self, option: str) -> None:
        with pytest.raises(MatchError, match=f"{option}= names 'rms_nrom', which is no Definition"):
            planned(add_norm, *ADD_NORM, **{option: ("rms_nrom",)})

    def test_a_refused_place_leaves_its_parts(self) -> None:
        def refuse(match: Match) -> str | None:
            return "two functions" if match.definition == "add_rms_norm" else None

        found = planned(add_norm, *ADD_NORM, refuse=refuse)
        assert taken(found) == {"rms_norm": 1}
        assert reasons(found, "add_rms_norm") == ["two functions"]

    def test_a_refused_part_of_what_is_taken_or_told_is_no_miss(self) -> None:
        def inside_only(match: Match) -> str | None:
            return "not written" if match.definition == "rms_norm" else None

        found = planned(add_norm, *ADD_NORM, refuse=inside_only)
        assert reasons(found, "rms_norm") == ["overlaps add_rms_norm, of which it would be a part"]
        cast_last = blocks.rms_norm_cast_last
        inputs, names = (rand(64, 512), rand(512)), ("rms_norm_cast_last",)
        assert set(reasons(planned(cast_last, *inputs, names=names, refuse=lambda m: "no"), names[0])) == {
            "no", "overlaps rms_norm_cast_last, of which it would be a part",
        }  # fmt: skip

    def test_a_refused_whole_is_told_beside_its_parts(self) -> None:
        def refuse(match: Match) -> str | None:
            return f"no {match.definition}"

        found = planned(add_norm, *ADD_NORM, refuse=refuse)
        assert reasons(found, "add_rms_norm") == ["no add_rms_norm"]
        assert "no rms_norm" in reasons(found, "rms_norm")

    def test_named_definitions_are_considered_verified_or_not(self) -> None:
        assert considered(INVENTORY, Policy(H200, ("experts_silu",))) == {"experts_silu"}
        verified = considered(INVENTORY, Policy(H200))
        assert "rms_norm" in verified
        assert not any("status:unverified" in INVENTORY.definitions[name].tags for name in verified)


class TestSolutions:
    def own(self, root: Path, **spec: Any) -> inventory.Inventory:
        """silu_mul alone, whose Solution has other fields."""
        for folder in ("definitions", "solutions", "kernels"):
            (root / folder).mkdir()
        definition = INVENTORY.file_of(INVENTORY.definitions["silu_mul"]).read_text()
        (root / "definitions" / "silu_mul.json").write_text(definition)
        solution = json.loads(INVENTORY.file_of(INVENTORY.solutions["silu_mul"]).read_text())
        solution["tags"] = spec.pop("tags", solution["tags"])
        solution["spec"] |= spec
        (root / "solutions" / "silu_mul.json").write_text(json.dumps(solution))
        for name, text in INVENTORY.source_texts("silu_mul").items():
            (root / name).write_text(text)
        return inventory.load(root, shipped=False)

    def code(self, x: Any, y: Any) -> Any:
        return F.silu(x) * y

    @pytest.mark.parametrize(("dtype", "fits"), [(BF16, True), (FP32, False)])
    def test_a_dtype_that_is_not_verified_is_refused(self, tmp_path: Path, dtype: torch.dtype, fits: bool) -> None:
        own = self.own(tmp_path, tags=["dtype:bfloat16"])
        found = planned(self.code, rand(4, 64, dtype=dtype), rand(4, 64, dtype=dtype), names=("silu_mul",), where=own)
        assert taken(found) == ({"silu_mul": 1} if fits else {})
        assert reasons(found, "silu_mul") == ([] if fits else ["Solution silu_mul is not verified for float32"])

    @pytest.mark.parametrize(("device", "fits"), [("h200", True), ("a100", False)])
    def test_a_gpu_that_is_not_targeted_is_refused(self, tmp_path: Path, device: str, fits: bool) -> None:
        own = self.own(tmp_path, target_hardware=["SM90"])
        found = planned(self.code, rand(4, 64), rand(4, 64), names=("silu_mul",), where=own, device=get_device(device))
        assert taken(found) == ({"silu_mul": 1} if fits else {})
        assert reasons(found, "silu_mul") == ([] if fits else ["Solution silu_mul does not target SM80"])

    def test_the_chosen_one_is_named(self) -> None:
        (place,) = planned(self.code, rand(4, 64), rand(4, 64)).chosen
        solution, reason = choose_solution(INVENTORY, place.match, H200)
        assert solution is not None
        assert (place.solution, reason) == (solution.name, "")
        assert place.seconds_after < place.seconds_before


class TestMisses:
    def test_one_inside_a_taken_place_is_dropped_and_one_outside_is_kept(self) -> None:
        def code(x: Any, y: Any, w: Any) -> Any:
            return blocks.rms_norm(x, w), blocks.rms_norm(y, w).mean(-1), torch.rsqrt(y.pow(2).mean(0, True) + 1e-5)

        found = planned(code, *ADD_NORM)
        assert taken(found) == {"rms_norm": 2}
        covered = {n for p in found.chosen for n in p.match.nodes}
        assert not [r for r in found.rejections if r.nodes[0] in covered]
