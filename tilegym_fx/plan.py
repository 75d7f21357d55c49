"""Policy: which Matches are taken, and by which Solution each is run.

Where Matches overlap, the one that saves the most estimated time is taken; every loser becomes a Rejection
that names the winner. Nothing here edits the graph.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx
import torch
from torch.fx import Graph, Node

from .cost import Device, node_seconds, region_seconds
from .errors import MatchError, UnknownNameError, did_you_mean
from .results import Match, Plan, PlannedMatch, Rejection

if TYPE_CHECKING:
    from .inventory import Inventory
    from .schema import Solution

#: A fused kernel that the roofline puts this much behind the author's own ops is not taken.
_WORST_RATIO = 1.02
#: By how much others must save more than what they would displace; a roofline is no truer than that.
_CLEARLY = 1.2


@dataclass(frozen=True)
class Policy:
    """What the user allows.

    Attributes:
        device: For estimates and for the Solutions' target hardware.
        only: Names of the Definitions to use, or one name; None for all whose kernels have run on a GPU.
        skip: Names of the Definitions to leave out, or one name.
        refuse: The reason why a Match cannot be used, or None; the source form refuses what it cannot write.
    """

    device: Device
    only: Collection[str] | None = None
    skip: Collection[str] = ()
    refuse: Callable[[Match], str | None] | None = None

    def __post_init__(self) -> None:
        for option in ("only", "skip"):
            if isinstance(getattr(self, option), str):  # one name, not a collection of letters
                object.__setattr__(self, option, (getattr(self, option),))

    def allows(self, definition: str) -> bool:
        return definition not in self.skip and (self.only is None or definition in self.only)


_UNPROVEN = {"status:draft", "status:unverified"}


def verified(inventory: Inventory) -> frozenset[str]:
    """The Definitions that do not say of themselves that their kernels have yet to pass on a GPU.

    Roots of others know no such tag; who names them wants them used.
    """
    return frozenset(name for name, d in inventory.definitions.items() if _UNPROVEN.isdisjoint(d.tags))


def waiting(inventory: Inventory) -> frozenset[str]:
    """The Definitions whose kernels have yet to pass on a GPU, drafts left out."""
    return frozenset(name for name, d in inventory.definitions.items() if "status:unverified" in d.tags)


def considered(inventory: Inventory, policy: Policy) -> frozenset[str]:
    """The Definitions to look for: those that the user names, else the verified ones."""
    return verified(inventory) if policy.only is None else frozenset(policy.only)


def plan(
    graph: Graph, matches: Sequence[Match], misses: Iterable[Rejection], inventory: Inventory, policy: Policy
) -> Plan:
    """Choose non-overlapping Matches and their Solutions.

    Raises:
        MatchError: If ``only`` or ``skip`` names a Definition that does not exist.
    """
    _require_known(policy, inventory)
    candidates: list[PlannedMatch] = []
    rejections: list[Rejection] = []
    refused: list[tuple[Match, str]] = []
    for match in matches:
        if not policy.allows(match.definition):
            rejections.append(_reject(match, lambda: "left out by only= or skip="))
            continue
        if policy.refuse is not None and (reason := policy.refuse(match)) is not None:
            refused.append((match, reason))
            continue
        candidate = _priced(match, inventory, policy.device, rejections)
        if candidate is not None:
            candidates.append(candidate)
    chosen = _choose(graph, candidates, rejections)
    rejections += _refusals(refused, chosen)
    covered = {node for planned in chosen for node in planned.match.nodes}
    rejections += [miss for miss in misses if miss.nodes[0] not in covered]
    return Plan(tuple(chosen), tuple(rejections))


def _require_known(policy: Policy, inventory: Inventory) -> None:
    for option, names in (("only", policy.only or ()), ("skip", policy.skip)):
        unknown = sorted(set(names) - set(inventory.definitions))
        if unknown:
            raise MatchError(
                f"{option}= names {unknown[0]!r}, which is no Definition",
                advice=f"{UnknownNameError.advice}{did_you_mean(unknown[0], inventory.definitions)}",
            )


def _refusals(refused: Sequence[tuple[Match, str]], chosen: Sequence[PlannedMatch]) -> Iterator[Rejection]:
    """What was refused, with its reason; a part of a place that is taken or told itself has none of its own."""
    around: dict[Node, list[Match]] = defaultdict(list)
    for match in (*(planned.match for planned in chosen), *(match for match, _ in refused)):
        for node in match.nodes:
            around[node].append(match)
    taken = {id(planned.match) for planned in chosen}
    for match, reason in refused:
        for whole in around[match.nodes[0]]:
            if set(match.nodes) < set(whole.nodes) and (id(whole) in taken or whole.definition == match.definition):
                reason = f"overlaps {whole.definition}, of which it would be a part"
                break
        yield _reject(match, functools.partial(str, reason))


def _reject(match: Match, why: Callable[[], str]) -> Rejection:
    return Rejection(match.definition, match.spelling, why, match.nodes, len(match.nodes), match.site)


def _priced(match: Match, inventory: Inventory, device: Device, rejections: list[Rejection]) -> PlannedMatch | None:
    inputs = [value for value in match.inputs.values() if isinstance(value, Node)]
    before = sum(node_seconds(node, device) for node in match.nodes)
    after = region_seconds(inputs, match.outputs, (*match.shared, *match.nodes), device)
    solution, reason = choose_solution(inventory, match, device)
    if solution is None:
        rejections.append(_reject(match, lambda: reason))
        return None
    if after > _WORST_RATIO * before:
        rejections.append(
            _reject(match, lambda: f"estimated slower than the author's ops: {after:.2g} s, {before:.2g} s")
        )
        return None
    return PlannedMatch(match, solution.name, before, after)


def choose_solution(inventory: Inventory, match: Match, device: Device) -> tuple[Solution | None, str]:
    """The first Solution that may run the Match on the device, or None and the reason."""
    solutions = inventory.solutions_for(match.definition)
    if not solutions:
        return None, "the inventory has no Solution for it"
    dtypes = {_dtype_name(v) for v in match.inputs.values() if isinstance(v, Node)} - {None}
    reason = ""
    for solution in solutions:
        verified = {tag.removeprefix("dtype:") for tag in solution.tags or () if tag.startswith("dtype:")}
        if verified and not dtypes <= verified:
            missing = ", ".join(sorted(map(str, dtypes - verified)))
            reason = f"Solution {solution.name} is not verified for {missing}"
        elif device.arch not in solution.spec.target_hardware:
            reason = f"Solution {solution.name} does not target {device.arch}"
        else:
            return solution, ""
    return None, reason


def _dtype_name(node: Node) -> str | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    return str(value.dtype).removeprefix("torch.")


def _choose(graph: Graph, candidates: list[PlannedMatch], rejections: list[Rejection]) -> list[PlannedMatch]:
    """The candidates that save most, without overlap and without any two that wait for each other.

    Two regions may each be convex and yet feed each other: then the one that saves least goes, and what it
    had displaced gets another chance.
    """
    while True:
        losers: list[Rejection] = []
        chosen = _without_overlap(graph, candidates, losers)
        cycle = _cycle(graph, chosen)
        if not cycle:
            rejections += losers
            return chosen
        loser = min(cycle, key=lambda p: p.seconds_before - p.seconds_after)
        rejections.append(_reject(loser.match, lambda: "it and another region would need each other's result"))
        candidates = [p for p in candidates if p is not loser]


def _without_overlap(graph: Graph, candidates: list[PlannedMatch], rejections: list[Rejection]) -> list[PlannedMatch]:
    position = {node: i for i, node in enumerate(graph.nodes)}

    def preference(planned: PlannedMatch) -> tuple[float, int, bool, str, int]:
        match = planned.match
        return (-_saving(planned), -len(match.nodes), match.kind != "exact", match.definition, position[match.nodes[0]])

    ranked = sorted(candidates, key=preference)
    owner: dict[Node, PlannedMatch] = {}
    losers = [planned for planned in ranked if not _take(planned, owner)]
    _exchange(ranked, losers, owner)
    for planned in ranked:
        winner = next(owner[n] for n in planned.match.nodes if n in owner)
        if winner is not planned:
            rejections.append(_reject(planned.match, functools.partial(_lost, planned, winner)))
    chosen = {_key(planned): planned for planned in owner.values()}
    return sorted(chosen.values(), key=lambda p: position[p.match.nodes[-1]])


def _saving(planned: PlannedMatch) -> float:
    return planned.seconds_before - planned.seconds_after


def _take(planned: PlannedMatch, owner: dict[Node, PlannedMatch]) -> bool:
    """Give a candidate its nodes, unless some have an owner."""
    if any(node in owner for node in planned.match.nodes):
        return False
    owner.update(dict.fromkeys(planned.match.nodes, planned))
    return True


def _lost(loser: PlannedMatch, winner: PlannedMatch) -> str:
    alone = _saving(winner) >= _saving(loser)
    return f"overlaps {winner.match.definition}, which saves more{'' if alone else ' with what fits beside it'}"


def _exchange(ranked: list[PlannedMatch], losers: list[PlannedMatch], owner: dict[Node, PlannedMatch]) -> None:
    """Let a loser in where it saves more, with what fits beside it then, than all that it displaces.

    What saves most by itself may keep several others out: an addition is the end of a rotary embedding, and the
    begin of a fused norm.
    """
    touching: dict[Node, list[int]] = defaultdict(list)
    for rank, planned in enumerate(ranked):
        for node in planned.match.nodes:
            touching[node].append(rank)
    for loser in losers:
        displaced = {_key(owner[n]): owner[n] for n in loser.match.nodes if n in owner}.values()
        freed = {node for planned in displaced for node in planned.match.nodes}
        entering: dict[Node, PlannedMatch] = {}
        _take(loser, entering)
        for rank in sorted({rank for node in freed for rank in touching[node]}):
            if all(node in freed or node not in owner for node in ranked[rank].match.nodes):
                _take(ranked[rank], entering)
        gained = sum(_saving(planned) for planned in {_key(p): p for p in entering.values()}.values())
        if gained > _CLEARLY * sum(map(_saving, displaced)) > 0:
            for node in freed:
                del owner[node]
            owner.update(entering)


def _cycle(graph: Graph, chosen: Sequence[PlannedMatch]) -> list[PlannedMatch]:
    home: dict[Node, Node | PlannedMatch] = {}
    for planned in chosen:
        home.update(dict.fromkeys(planned.match.nodes, planned))
    quotient = nx.DiGraph()
    for node in graph.nodes:
        here = home.get(node, node)
        for source in node.all_input_nodes:
            there = home.get(source, source)
            if there is not here:
                quotient.add_edge(_key(there), _key(here))
    by_key = {_key(p): p for p in chosen}
    for component in nx.strongly_connected_components(quotient):
        if len(component) > 1:
            return [by_key[k] for k in component if k in by_key]
    return []


def _key(item: Node | PlannedMatch) -> int:
    return id(item)
