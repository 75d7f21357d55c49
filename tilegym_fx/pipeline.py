"""The whole pass as one flat function of named, timed stages."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.fx import Graph, Node

from .cost import Device, node_seconds
from .errors import PatternError
from .facts import operations_of
from .match import Matcher
from .normalize import normalize, note_products, pin_layouts
from .pattern import FormPatterns, Pattern, form_patterns, merged
from .plan import Policy, considered, plan, verified, waiting
from .results import Plan, PlannedMatch, Rejection, Site, misses, places, told

if TYPE_CHECKING:
    from .inventory import Inventory

log = logging.getLogger("tilegym_fx")
#: Share of the time that must be left over for unverified Definitions to be looked for.
_WORTH_TELLING = 0.01
_SHOWN = 8
_UNVERIFIED = "it fits, but is unverified: it is used where only= (--only) names it"
_memory: WeakKeyDictionary[Inventory, _Memory] = WeakKeyDictionary()


@dataclass
class _Memory:
    """What this process has traced of one inventory.

    Attributes:
        forms: Definition -> its forms.
        matchers: Names of forms that a graph can have -> the matcher of their Patterns.
        proofs: What matchers have traced at the inputs of places, for all of them.
    """

    forms: dict[str, tuple[FormPatterns, ...]] = field(default_factory=dict)
    matchers: dict[tuple[tuple[str, str], ...], Matcher] = field(default_factory=dict)
    proofs: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What the pass found in one graph.

    Attributes:
        plan: The chosen Matches and every Rejection.
        nodes: Calls in the graph before normalisation.
        seconds: Wall time per stage: ``normalize``, ``match``, ``plan``.
        seconds_covered: Estimated device time of the chosen Solutions.
        uncovered: Estimated device time of every other call that takes any, in graph order.
        anywhere: What would be chosen if the policy refused no place; None where it refuses none.
        device: Whose times are estimated.
        runs: What the chosen places run where the graph was compiled; empty where it was not.
        already: Calls of ops of ours that were in the graph before, as in one of a kernelized model.
    """

    plan: Plan = field(repr=False)
    nodes: int
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_covered: float = 0.0
    uncovered: tuple[tuple[Node, float], ...] = field(default=(), repr=False)
    anywhere: tuple[PlannedMatch, ...] | None = field(default=None, repr=False)
    device: str = ""
    runs: str = ""
    already: int = 0

    @property
    def chosen(self) -> tuple[PlannedMatch, ...]:
        return self.plan.chosen

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return self.plan.rejections

    @property
    def seconds_total(self) -> float:
        return self.seconds_covered + sum(s for _, s in self.uncovered)

    @property
    def coverage(self) -> float:
        """Share of the estimated time that our kernels take, 0 to 1."""
        total = self.seconds_total
        return self.seconds_covered / total if total else 0.0

    def counts(self) -> dict[str, int]:
        """Definition -> places that it takes."""
        return dict(Counter(planned.match.definition for planned in self.chosen))

    def misses(self) -> list[str]:
        """The reasons, nearest first, each in one line with its first place; ``rejections`` has every place."""
        return misses(self.rejections)

    def __str__(self) -> str:
        already = f", {self.already} of ops of ours already" if self.already else ""
        lines = [f"a graph of {self.nodes} calls{already}: {places(len(self.chosen), self.runs)}"]
        lines += [f"  {name:28} {count}" for name, count in sorted(self.counts().items())]
        on = f" on {self.device}" if self.device else ""
        lines.append(f"  estimated coverage{on}: {self.coverage:.1%} of {self.seconds_total * 1e3:.3g} ms")
        return "\n".join(lines + told(self.misses(), _SHOWN, ".misses()"))


def matcher_for(
    inventory: Inventory, names: Collection[str] | None = None, operations: Collection[Any] | None = None
) -> Matcher:
    """The matcher of some Definitions of an inventory; what is traced is kept for the process.

    A Definition that cannot be traced costs only itself: it is warned about and left out.

    Args:
        inventory: Whose Definitions.
        names: Which ones; by default those that are neither drafts nor unverified.
        operations: What the graph has; forms that need others are not traced in full. By default all are.
    """
    memory = _memory.setdefault(inventory, _Memory())
    wanted = set(verified(inventory) if names is None else names)
    chosen = {name: _forms(inventory, name, memory, operations) for name in inventory.definitions if name in wanted}
    key = tuple((name, form.form.name) for name, forms in chosen.items() for form in forms)
    if key not in memory.matchers:
        patterns = [pattern for name, forms in chosen.items() for pattern in _merged(name, forms, memory)]
        memory.matchers[key] = Matcher(inventory.definitions, patterns, memory.proofs)
    return memory.matchers[key]


def _forms(
    inventory: Inventory, name: str, memory: _Memory, operations: Collection[Any] | None
) -> tuple[FormPatterns, ...]:
    """The forms of a Definition that a graph with these operations can have."""
    if name not in memory.forms:
        memory.forms[name] = form_patterns(inventory, name)
    try:
        return tuple(f for f in memory.forms[name] if operations is None or f.operations <= set(operations))
    except PatternError as error:
        return _left_out(name, error, memory)


def _merged(name: str, forms: Sequence[FormPatterns], memory: _Memory) -> tuple[Pattern, ...]:
    try:
        return merged(forms)
    except PatternError as error:
        return _left_out(name, error, memory)


def _left_out(name: str, error: PatternError, memory: _Memory) -> tuple[()]:
    warnings.warn(f"tilegym_fx: {name} is left out: {error}", stacklevel=5)
    memory.forms[name] = ()
    return ()


def find(
    graph: Graph,
    inventory: Inventory,
    policy: Policy,
    site_of: Callable[[Node], Site],
    *,
    keep_layouts: bool = False,
    tell_waiting: bool = False,
) -> Outcome:
    """Normalise the graph in place, match every Pattern, and plan. Nothing is rewritten.

    Args:
        graph: An ATen graph, not decomposed, with fake values in ``meta["val"]``.
        inventory: Whose Definitions to look for.
        policy: Device, ``only`` and ``skip``.
        site_of: Where in the model's source a node comes from.
        keep_layouts: The graph is going to run: what its caller sees contiguous must stay so.
        tell_waiting: Reject, with that reason, where an unverified Definition would take what is left over.
    """
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    seconds: dict[str, float] = {}
    with _timed("normalize", seconds):
        if keep_layouts:
            note_products(graph)
            pin_layouts(graph)
        normalize(graph)
    matcher = matcher_for(inventory, considered(inventory, policy), operations_of(graph))
    with _timed("match", seconds):
        matches, misses = matcher.match(graph, site_of)
    with _timed("plan", seconds):
        chosen = plan(graph, matches, misses, inventory, policy)
        free = replace(policy, refuse=None)
        anywhere = plan(graph, matches, (), inventory, free).chosen if policy.refuse is not None else None
    left_over = tuple(_uncovered(graph, chosen, policy.device))
    uncovered = tuple((node, seconds) for node, seconds in left_over if not _is_ours(node.target))
    covered = sum(p.seconds_after for p in chosen.chosen)
    covered += sum(seconds for node, seconds in left_over if _is_ours(node.target))
    left = sum(seconds for _, seconds in uncovered)
    if tell_waiting and policy.only is None and left > _WORTH_TELLING * (covered + left):
        told = _waiting(graph, inventory, {node for node, _ in uncovered}, site_of)
        chosen = Plan(chosen.chosen, (*chosen.rejections, *told))
    log.info(
        "%d nodes, %d matches, %d chosen, %d rejected",
        len(targets),
        len(matches),
        len(chosen.chosen),
        len(chosen.rejections),
    )
    already = sum(map(_is_ours, targets))
    return Outcome(chosen, len(targets), seconds, covered, uncovered, anywhere, policy.device.name, already=already)


def _is_ours(target: Any) -> bool:
    """Whether a call runs a kernel of ours already, as in the graph of a kernelized model."""
    return getattr(target, "namespace", "") == "tilegym_fx"


def _waiting(
    graph: Graph, inventory: Inventory, left: Set[Node], site_of: Callable[[Node], Site]
) -> Iterator[Rejection]:
    matches, _ = matcher_for(inventory, waiting(inventory), operations_of(graph)).match(graph, site_of)
    for m in matches:
        if not left.isdisjoint(m.nodes):
            yield Rejection(m.definition, m.spelling, lambda: _UNVERIFIED, m.nodes, len(m.nodes), m.site)


def _uncovered(graph: Graph, chosen: Plan, device: Device) -> Iterator[tuple[Node, float]]:
    covered = {node for planned in chosen.chosen for node in planned.match.nodes}
    shared = {node for planned in chosen.chosen for node in planned.match.shared}
    for node in reversed(graph.nodes):
        if node in shared and covered.issuperset(node.users):  # nobody else reads it: it goes with the regions
            covered.add(node)
    for node in graph.nodes:
        if node.op == "call_function" and node not in covered:
            seconds = node_seconds(node, device)
            if seconds > 0:
                yield node, seconds


@contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
