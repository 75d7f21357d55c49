"""Pattern x graph -> Matches and Rejections. Edits nothing; knows neither Solutions nor speed.

The search starts at a pattern's rarest operation and goes along definitions and uses, trying both orders of
commutative operands. A place that fits is then checked: who else reads its inner values, in-place writes
between its nodes, a path that leaves the region and comes back, the pattern's own guards, and at last the
proof: the function is traced again at the place's own tensors and literals and must give the identical graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .facts import SHAREABLE, Facts, Symbol, constants_of, graph_facts
from .normalize.aliasing import Writes
from .normalize.edit import shape_key, switches_mode
from .pattern import OPEN, Captured, Form, Pattern, specialize
from .results import Match, MatchKind, Rejection, Site
from .writing import why_not_written, written_results

if TYPE_CHECKING:
    from .schema import Definition

#: Places tried for one anchor before giving up: they differ only in which of several equal users is taken.
_MAX_PLACES = 16


class _Mismatch(Exception):
    """Internal: a place does not fit; carries the reason for the Rejection."""

    def __init__(self, why: Callable[[], str], nodes: Sequence[Node]):
        self.why, self.nodes = why, tuple(nodes)


class _Unfit(_Mismatch):
    """Internal: a sound place that does not fit for what its inputs are."""


class GraphIndex:
    """What every pattern's search needs of one graph, computed once."""

    def __init__(self, graph: Graph):
        self.facts = graph_facts(graph)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writes = Writes(graph)
        self.section = dict(zip(graph.nodes, accumulate(switches_mode(node) for node in graph.nodes), strict=True))
        self.by_operation: dict[Any, list[Node]] = defaultdict(list)
        for node, facts in self.facts.items():
            self.by_operation[facts.operation].append(node)
        self.constants = {node for node in constants_of(graph) if not self.writes.touched(node)}
        self._readers: dict[Node, dict[Any, list[Node]]] = {}

    def may_be_shared(self, node: Node) -> bool:
        """Whether others may read an inner value too: beside a kernel it costs little or nothing."""
        return node.target in SHAREABLE or node in self.constants

    def readers(self, value: Node, operation: Any, near: int) -> Iterator[Node]:
        """The calls of an operation that read a value, those nearest to a position first.

        Some values are read in every layer, so only as many are looked at as are asked for.
        """
        if value not in self._readers:
            by_operation: dict[Any, list[Node]] = defaultdict(list)
            for node in sorted((u for u in value.users if u in self.facts), key=self.position.__getitem__):
                by_operation[self.facts[node].operation].append(node)
            self._readers[value] = by_operation
        found = self._readers[value].get(operation, ())
        after = bisect_left(found, near, key=self.position.__getitem__)
        before = after - 1
        while before >= 0 or after < len(found):
            gap = near - self.position[found[before]] if before >= 0 else None
            if gap is not None and (after >= len(found) or gap <= self.position[found[after]] - near):
                yield found[before]
                before -= 1
            else:
                yield found[after]
                after += 1


@dataclass(frozen=True)
class _Step:
    """A pattern node to lay next: a user of nodes that are laid by then."""

    node: Node
    laid: tuple[Node, ...]


def _steps(pattern: Pattern, anchor: Node) -> tuple[_Step, ...]:
    """The order in which a pattern is laid from its anchor: first the users of which most operands are laid."""
    laid: dict[Node, None] = {}
    _lay_with_operands(pattern, anchor, laid)
    steps = []
    while open_nodes := {user: None for node in laid for user in pattern.users[node] if user not in laid}:

        def rank(node: Node) -> tuple[int, int]:
            known = [o for o in pattern.nodes[node].facts.operands if o in laid]
            return len(known), -min(len(pattern.users[o]) for o in known)

        best = max(open_nodes, key=rank)
        known = dict.fromkeys(o for o in pattern.nodes[best].facts.operands if o in laid)
        steps.append(_Step(best, tuple(known)))
        _lay_with_operands(pattern, best, laid)
    return tuple(steps)


def _lay_with_operands(pattern: Pattern, node: Node, laid: dict[Node, None]) -> None:
    if node not in laid:
        laid[node] = None
        for operand in pattern.nodes[node].facts.operands if node in pattern.nodes else ():
            _lay_with_operands(pattern, operand, laid)


@dataclass
class _Search:
    """One attempt to lay a pattern over a graph, with everything bound so far.

    A ``lenient`` search lets one node have other literals than the pattern, and keeps it and the reason: what
    it finds is a near miss.
    """

    pattern: Pattern
    index: GraphIndex
    steps: Sequence[_Step] = ()
    bound: dict[Node, Node] = field(default_factory=dict)
    taken: dict[Node, Node] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    deepest: int = 0
    miss: Callable[[], str] | None = None
    miss_node: Node | None = None
    lenient: bool = False
    excuse: Callable[[], str] | None = None
    excused: Node | None = None

    def places(self, anchor: Node, start: Node) -> Iterator[None]:
        """Every way to complete the pattern with ``anchor`` on ``start``; read ``bound`` at each yield."""
        for _ in self._lay(anchor, start):
            yield from self._complete(0)

    def _complete(self, done: int) -> Iterator[None]:
        """Lay the pattern nodes that are users of laid ones, step by step, until none is left."""
        if done == len(self.steps):
            if len(self.taken) == len(self.pattern.nodes):
                yield
            return
        step = self.steps[done]
        if step.node in self.bound:
            yield from self._complete(done + 1)
            return
        here = min((self.bound[o] for o in step.laid), key=lambda node: len(node.users))
        operation = self.pattern.nodes[step.node].facts.operation
        near = max(map(self.index.position.__getitem__, self.taken))
        is_read = False
        for user in self.index.readers(here, operation, near):
            if user not in self.taken:
                is_read = True
                for _ in self._lay(step.node, user):
                    yield from self._complete(done + 1)
        if not is_read:
            self._note(here, lambda: f"{here.name} is not read by {operation}, which the pattern needs next")

    def _lay(self, wanted: Node, node: Node) -> Iterator[None]:
        """Bind one pattern node and all that it reads."""
        known = self.bound.get(wanted)
        if known is not None:
            if known is node:
                yield
            else:
                self._note(node, lambda: f"{node.name} should be the same value as {known.name}")
            return
        if wanted in self.pattern.tensors:
            if isinstance(node.meta.get("val"), torch.Tensor):
                self.bound[wanted] = node
                yield
                del self.bound[wanted]
            return
        yield from self._lay_call(wanted, node)

    def _lay_call(self, wanted: Node, node: Node) -> Iterator[None]:
        here, spec = self.index.facts.get(node), self.pattern.nodes[wanted]
        if here is None or node in self.taken or here.operation != spec.facts.operation:
            self._note(node, lambda: f"found {_name(node)} where the pattern has {spec.facts.operation}")
            return
        if len(here.operands) != len(spec.facts.operands):
            sentence = "{} reads tensors: {}, and in the pattern {}"
            self._note(node, _say(sentence, node, len(here.operands), len(spec.facts.operands)))
            return
        captured = self._literals(node, here, spec.literals)
        excused = callable(captured)
        if callable(captured):
            self._note(node, captured)
            if not self.lenient or self.excused is not None:
                return
            self.excuse, self.excused, captured = captured, node, {}
        self.bound[wanted] = node
        self.taken[node] = wanted
        self.scalars.update(captured)
        orders = [spec.facts.operands]
        if spec.facts.commutes and here.commutes:
            orders.append(spec.facts.operands[::-1])
        for operands in orders:
            yield from self._lay_all(operands, here.operands)
        del self.bound[wanted], self.taken[node]
        for name in captured:
            del self.scalars[name]
        if excused:
            self.excused = None

    def _lay_all(self, wanted: Sequence[Node], nodes: Sequence[Node], done: int = 0) -> Iterator[None]:
        if done == len(wanted):
            yield
            return
        for _ in self._lay(wanted[done], nodes[done]):
            yield from self._lay_all(wanted, nodes, done + 1)

    def _literals(
        self, node: Node, here: Facts, wanted: tuple[tuple[str, Any], ...]
    ) -> dict[str, Any] | Callable[[], str]:
        """The scalars captured at this node, or the reason if a literal is another one."""
        captured: dict[str, Any] = {}
        for (place, value), (wanted_place, expected) in zip(here.literals, wanted, strict=False):
            if isinstance(expected, Captured):
                known = self.scalars.get(expected.name, value)
                if not isinstance(value, int | float | Symbol) or known != value:
                    return _say("{!r} at {} cannot be {}", value, node, expected.name)
                if expected.name not in self.scalars:
                    captured[expected.name] = value
            elif place != wanted_place or (expected is not OPEN and not _equal(value, expected)):
                return _say("argument {} of {} is {}, not {}", place, node, value, expected)
        if len(here.literals) != len(wanted):
            return _say("{} has other arguments than the pattern's {}", node, here.operation)
        return captured

    def _note(self, node: Node, why: Callable[[], str]) -> None:
        if self.miss is None or len(self.taken) > self.deepest:
            self.deepest, self.miss, self.miss_node = len(self.taken), why, node


def _nearest_miss(failed: _Search, anchor: Node, start: Node) -> tuple[Callable[[], str], tuple[Node, ...], int] | None:
    """Why a place nearly fits, the guilty nodes and how much fits; None where too little does.

    One wrong literal is a near miss if all else fits, wherever the search met it.
    """
    size = len(failed.pattern.nodes)
    if failed.miss is None or failed.miss_node is None:
        return None
    if 2 * failed.deepest < size and size > 1:
        lenient = _Search(failed.pattern, failed.index, failed.steps, lenient=True)
        for _ in lenient.places(anchor, start):
            if lenient.excuse is not None and lenient.excused is not None:
                return lenient.excuse, (lenient.excused,), size - 1
        return None
    return failed.miss, (failed.miss_node,), failed.deepest


def _say(sentence: str, *values: object) -> Callable[[], str]:
    """A reason that is put into words only when somebody reads it."""
    return lambda: sentence.format(*values)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (a == b and isinstance(a, bool) == isinstance(b, bool))


def _name(node: Node) -> str:
    return f"{node.name} ({node.target})" if node.op == "call_function" else f"{node.op} {node.name}"


class Matcher:
    """Finds the places of Patterns in one graph.

    Args:
        definitions: The Definitions of the Patterns, by name.
        patterns: What to look for.
        proofs: Traces at matched inputs, kept between graphs; give one dict to matchers of one inventory.
    """

    def __init__(
        self,
        definitions: Mapping[str, Definition],
        patterns: Iterable[Pattern],
        proofs: dict[Any, Pattern | None] | None = None,
    ):
        self._definitions = definitions
        self._patterns = tuple(patterns)
        self._exact = {} if proofs is None else proofs

    def match(self, graph: Graph, site_of: Callable[[Node], Site]) -> tuple[list[Match], list[Rejection]]:
        """All places where a pattern fits, and the nearest misses.

        Matches may overlap; choosing is the plan's work. ``graph`` must be in normal form.
        """
        index = GraphIndex(graph)
        matches: list[Match] = []
        rejections: list[Rejection] = []
        for pattern in self._patterns:
            matches += self._match_pattern(pattern, index, site_of, rejections)
        return _distinct(matches), rejections

    def _match_pattern(
        self,
        pattern: Pattern,
        index: GraphIndex,
        site_of: Callable[[Node], Site],
        rejections: list[Rejection],
    ) -> Iterator[Match]:
        anchor = _rarest(pattern, index)
        if anchor is None:
            return
        steps = _steps(pattern, anchor)
        done: set[Node] = set()
        for start in index.by_operation[pattern.nodes[anchor].facts.operation]:
            if start in done:
                continue
            found = self._match_at(_Search(pattern, index, steps), anchor, start, site_of)
            if isinstance(found, Match):
                done.update(found.nodes)
                yield found
            elif found is not None:
                rejections.append(found)

    def _match_at(
        self, search: _Search, anchor: Node, start: Node, site_of: Callable[[Node], Site]
    ) -> Match | Rejection | None:
        pattern = search.pattern
        mismatch: _Mismatch | None = None
        for _ in islice(search.places(anchor, start), _MAX_PLACES):
            found = self._checked(search, site_of(start))
            if isinstance(found, Match):
                return found
            if isinstance(mismatch, _Unfit) and not isinstance(found, _Unfit):
                break  # the nearest places are sound in themselves, those beyond mix values of several layers
            mismatch = mismatch or found
        if mismatch is not None:
            why, nodes, depth = mismatch.why, mismatch.nodes, len(pattern.nodes)
        else:
            near = _nearest_miss(search, anchor, start)
            if near is None:
                return None
            why, nodes, depth = near
        return Rejection(pattern.definition, pattern.spelling, why, (start, *nodes), depth, site_of(start))

    def _checked(self, search: _Search, site: Site) -> Match | _Mismatch:
        try:
            return self._check(search, site)
        except _Mismatch as error:
            return error

    def _check(self, search: _Search, site: Site) -> Match:
        """The place as a Match, or the reason why it is none (raised as _Mismatch)."""
        pattern, index = search.pattern, search.index
        region = sorted(search.taken, key=index.position.__getitem__)
        outputs = tuple(search.bound[o] for o in pattern.outputs)
        shared = _shared(region, outputs, index)
        nodes = tuple(n for n in region if n not in shared)
        _require_convex(nodes, index)
        _require_one_mode(region, index)
        by_name = {name: search.bound[p] for p, name in pattern.tensors.items() if p in search.bound}
        scalars = {k: v.node if isinstance(v, Symbol) else v for k, v in search.scalars.items()} | dict(pattern.fixed)
        inputs = {p: by_name[p] if p in by_name else scalars[p] for p in pattern.parameters}
        _require_outside(inputs, nodes)
        _require_unwritten(region, inputs, outputs, index)
        values = {k: v.meta["val"] if isinstance(v, Node) else v for k, v in inputs.items()}
        _require_one_device(values, region)
        form = self._proven_form(pattern, inputs, values, outputs, index)
        kind = _kind(self._definitions[pattern.definition], values)
        written = written_results(inputs, outputs)
        return Match(pattern.definition, form.name, kind, inputs, outputs, nodes, tuple(shared), site, written)

    def _proven_form(
        self,
        pattern: Pattern,
        inputs: Mapping[str, Any],
        values: Mapping[str, Any],
        outputs: tuple[Node, ...],
        index: GraphIndex,
    ) -> Form:
        """The form whose trace at these very inputs is this very region."""
        failures: list[_Mismatch] = []
        for form in pattern.forms:
            found = self._refusal(pattern, form, inputs, values, outputs, index)
            if found is None:
                return form
            failures.append(found)
        raise next((f for f in failures if not isinstance(f, _Unfit)), failures[0])

    def _refusal(
        self,
        pattern: Pattern,
        form: Form,
        inputs: Mapping[str, Any],
        values: Mapping[str, Any],
        outputs: tuple[Node, ...],
        index: GraphIndex,
    ) -> _Mismatch | None:
        try:
            _require_guards(form, values, outputs)
            self._require_identical(pattern, form, inputs, values, outputs, index)
        except _Mismatch as error:
            return error
        return None

    def _require_identical(
        self,
        pattern: Pattern,
        form: Form,
        inputs: Mapping[str, Any],
        values: Mapping[str, Any],
        outputs: tuple[Node, ...],
        index: GraphIndex,
    ) -> None:
        key = (pattern.definition, form.name, *(_value_key(v) for v in values.values()))
        if key not in self._exact:
            self._exact[key] = _specialize(pattern, form, values)
        exact = self._exact[key]
        if exact is None:
            raise _Unfit(lambda: f"{pattern.definition} is not defined for these shapes and dtypes", outputs)
        search = _Search(exact, index)
        by_name = {name: p for p, name in exact.tensors.items()}
        search.bound.update({by_name[k]: v for k, v in inputs.items() if k in by_name and isinstance(v, Node)})
        if not _lay_outputs(search, exact.outputs, outputs):
            reason = search.miss or (lambda: "the operations are the same but not their arguments")
            raise _Mismatch(lambda: f"traced at these inputs it differs: {reason()}", outputs)


def _require_guards(form: Form, values: Mapping[str, Any], outputs: tuple[Node, ...]) -> None:
    for guard in form.guards:
        try:
            reason = guard(**values)
        except GuardOnDataDependentSymNode:
            reason = "it cannot be told before the graph runs whether its sizes fit"
        if reason is not None:
            raise _Unfit(_say("{}", reason), outputs)


def _lay_outputs(search: _Search, wanted: Sequence[Node], outputs: Sequence[Node]) -> bool:
    return any(_same_dtypes(search) for _ in search._lay_all(wanted, outputs))


def _same_dtypes(search: _Search) -> bool:
    """Whether all that was laid has the dtypes of the trace; under autocast a graph's values have others."""
    for node, wanted in search.taken.items():
        here, traced = (getattr(n.meta.get("val"), "dtype", None) for n in (node, wanted))
        if here != traced:
            search._note(node, _say("{} is {} here, not {} (autocast?)", node, here, traced))
            return False
    return True


def _specialize(pattern: Pattern, form: Form, values: Mapping[str, Any]) -> Pattern | None:
    modes = [m for v in values.values() if (m := getattr(v, "fake_mode", None)) is not None]
    try:
        if modes:
            with modes[0]:
                return specialize(pattern, form, values)
        return specialize(pattern, form, values)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, ZeroDivisionError):
        return None  # the function does not run at these shapes: that is a reason, not a crash


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return shape_key(value.shape), value.dtype, str(value.device)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return "symbol", str(value.node.expr)
    return type(value).__name__, value


def _rarest(pattern: Pattern, index: GraphIndex) -> Node | None:
    """The pattern's operation that the graph has least of; None if it lacks one.

    Never one that several places may share: each would be looked for from the same start.
    """
    need = Counter(p.facts.operation for p in pattern.nodes.values())
    if any(len(index.by_operation.get(operation, ())) < count for operation, count in need.items()):
        return None
    shared = constants_of(pattern.graph)
    own = [n for n in pattern.nodes if n.target not in SHAREABLE and n not in shared] or list(pattern.nodes)
    return min(own, key=lambda n: len(index.by_operation[pattern.nodes[n].facts.operation]))


def _shared(region: Sequence[Node], outputs: Sequence[Node], index: GraphIndex) -> list[Node]:
    """Inner nodes that others read too: views, casts and constants may stay beside the kernel, others may not."""
    inside = set(region)
    shared = []
    for node in region:
        if node in outputs or all(u in inside for u in node.users):
            continue
        if not index.may_be_shared(node):
            reader = next(u for u in node.users if u not in inside)
            raise _Mismatch(_say("the inner value {} is also read by {}", node, _name(reader)), [node])
        shared.append(node)
    return _with_sources(shared, inside, index)


def _with_sources(shared: list[Node], inside: set[Node], index: GraphIndex) -> list[Node]:
    """What stays needs what it reads to stay."""
    stay = list(shared)
    for node in stay:
        for source in node.all_input_nodes:
            if source in inside and source not in stay:
                if not index.may_be_shared(source):
                    reader = next((u for u in node.users if u not in inside), node)
                    raise _Mismatch(_say("the inner value {} is also read by {}", node, _name(reader)), [node])
                stay.append(source)
    return stay


def _require_convex(region: Sequence[Node], index: GraphIndex) -> None:
    """No path may leave the region and come back: the kernel would need its own result."""
    inside, last = set(region), index.position[region[-1]]
    todo = [u for n in region for u in n.users if u not in inside]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or index.position[node] > last:
            continue
        seen.add(node)
        for user in node.users:
            if user in inside:
                raise _Mismatch(_say("{} reads the region and feeds it", node), [node])
            todo.append(user)


def _require_outside(inputs: Mapping[str, Any], nodes: Sequence[Node]) -> None:
    """No input may be a value that the kernel takes the place of."""
    for name, value in inputs.items():
        if value in nodes:
            raise _Mismatch(_say("its {} would be {}, a value inside it", name, value), [value])


def _require_unwritten(
    region: Sequence[Node], inputs: Mapping[str, Any], outputs: Sequence[Node], index: GraphIndex
) -> None:
    """Nothing that the region reads or computes may be written in place while it is computed, but for its own results.

    An output may be written later if its memory is its own, as that of the kernel's output will be.
    """
    writes = index.writes
    if not writes:
        return
    if (reason := why_not_written(region, inputs, outputs, writes)) is not None:
        raise _Mismatch(reason[0], [reason[1]])
    first, last = region[0], region[-1]
    results = {outputs[i] for i in written_results(inputs, outputs)}
    own_writes = results | {node.args[0] for node in results}
    for value in {*(v for v in inputs.values() if isinstance(v, Node)), *region} - own_writes:
        if writes.touched(value) and writes.epoch(value, first) != writes.epoch(value, last):
            raise _Mismatch(_say("{} is written in place inside the region", value), [value])
    own = Counter(root for output in outputs for root in writes.roots(output))
    for output in outputs:
        if output in results or not writes.touched(output):
            continue
        if any(root not in region or own[root] > 1 for root in writes.roots(output)):
            raise _Mismatch(_say("{} shares memory that is written in place", output), [output])


def _require_one_mode(region: Sequence[Node], index: GraphIndex) -> None:
    """Gradients and autocast may not be switched on or off between the region's calls."""
    for node in region:
        if index.section[node] != index.section[region[0]]:
            raise _Mismatch(_say("the grad or autocast mode changes between {} and {}", region[0], node), [node])


def _require_one_device(values: Mapping[str, Any], region: Sequence[Node]) -> None:
    devices = {v.device for v in values.values() if isinstance(v, torch.Tensor) and v.dim()}
    if len(devices) > 1:
        raise _Mismatch(lambda: f"its inputs are on {len(devices)} devices", region[:1])


def _kind(definition: Definition, values: Mapping[str, Any]) -> MatchKind:
    declared = {k: s.dtype for k, s in definition.inputs.items() if s.shape is not None}
    own = all(str(values[k].dtype).removeprefix("torch.") == d for k, d in declared.items())
    return "exact" if own else "compatible"


def _distinct(matches: list[Match]) -> list[Match]:
    """One Match per Definition and region: several spellings or probes may fit the same place."""
    seen: set[Any] = set()
    out = []
    for match in matches:
        key = (match.definition, frozenset(match.nodes), match.outputs)
        if key not in seen:
            seen.add(key)
            out.append(match)
    return out


__all__ = ["GraphIndex", "Matcher"]
