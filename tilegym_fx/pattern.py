"""A Pattern: the searchable graph of a reference or a spelling, and which of its literals mean what.

The function is traced at *probes*, whose sizes and numbers no constant is likely to equal. A literal that is a
scalar input there is that input, captured; one that is surely a constant is part of the maths; any other may
follow from shapes or dtypes, is left open in the search and settled by tracing again at the matched inputs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .axes import declared
from .errors import PatternError
from .facts import Facts, graph_facts, operations_of
from .normalize import normalize
from .probes import Probe, probes
from .sketch import sketch

if TYPE_CHECKING:
    from .inventory import Inventory
    from .schema import Definition


@dataclass(frozen=True)
class Captured:
    """A literal that is the Definition's scalar input ``name``."""

    name: str


class Open:
    """A literal that follows from shapes and dtypes: anything fits until the trace at the matched inputs."""


OPEN = Open()


@dataclass(frozen=True)
class PatternNode:
    """One operation of a Pattern; ``literals`` has values, :class:`Captured` or :data:`OPEN`."""

    name: str
    facts: Facts
    literals: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Form:
    """One function that computes a Definition.

    Attributes:
        name: ``reference``, or the name of the spelling.
        function: Plain PyTorch with the Definition's inputs as parameters.
        guards: Checks on a place's tensors and literals, each giving a reason to refuse or None.
        fixed: Scalars for which it is written alone, with their values: those that have a default. What such a
            number does is not in the graph, as with a factor of 1.
    """

    name: str
    function: Callable[..., Any]
    guards: tuple[Callable[..., str | None], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    """The searchable graph of one way to compute a Definition.

    Attributes:
        definition: Name of the Definition.
        forms: The functions that trace to this graph at the probes; they may differ elsewhere.
        parameters: The Definition's inputs in order.
        tensors: Placeholder node -> name of the tensor input.
        nodes: Call node -> what it must look like, in graph order.
        users: Call or placeholder node -> the pattern nodes that read it.
        outputs: The nodes that the Definition's outputs are, in order.
        scalars: The scalar inputs that are read off the graph.
        fixed: The other scalar inputs, with the value that each has.
    """

    definition: str
    forms: tuple[Form, ...]
    parameters: tuple[str, ...]
    tensors: Mapping[Node, str]
    nodes: Mapping[Node, PatternNode]
    users: Mapping[Node, tuple[Node, ...]]
    outputs: tuple[Node, ...]
    scalars: tuple[str, ...]
    graph: Graph = field(repr=False)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spelling(self) -> str:
        """Name of the first form."""
        return self.forms[0].name

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for patterns that would match the same places."""
        index = {n: i for i, n in enumerate([*self.tensors, *self.nodes])}
        calls = tuple(
            (str(p.facts.operation), tuple(index[o] for o in p.facts.operands), str(_printable(p.literals)))
            for p in self.nodes.values()
        )
        return calls, tuple(index[o] for o in self.outputs), tuple(sorted(self.fixed.items()))


def _printable(literals: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    return [(place, "open" if value is OPEN else value) for place, value in literals]


def trace(function: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Graph, dict[str, Node], tuple[Node, ...]]:
    """Trace ``function`` on fake or meta tensors and literals to a graph in normal form.

    Returns:
        The graph, the placeholder of each tensor input, and the output nodes.
    """
    apart = dict(zip(inputs, _apart(inputs.values()), strict=True))
    with torch.no_grad(), torch._C._DisableAutocast(), _quiet_fake_tensors():
        graph, placeholders = sketch(function, apart) or _made_fx(function, apart)
    normalize(graph)
    result = next(iter(reversed(graph.nodes))).args[0]
    outputs = tuple(result) if isinstance(result, list | tuple) else (result,)
    return graph, {k: n for k, n in placeholders.items() if isinstance(inputs[k], torch.Tensor)}, outputs


def _made_fx(function: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Graph, dict[str, Node]]:
    flowing = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat)}

    def flat(*values: Any) -> Any:
        return function(**{**inputs, **dict(zip(flowing, values, strict=True))})

    graph = make_fx(flat, pre_dispatch=True)(*flowing.values()).graph
    return graph, dict(zip(flowing, graph.find_nodes(op="placeholder"), strict=True))


def _apart(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with one tensor in two places as two: a trace knows its inputs by identity."""
    seen: set[int] = set()
    for value in values:
        yield value.detach() if id(value) in seen and isinstance(value, torch.Tensor) else value
        seen.add(id(value))


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """A spelling that is not meant for some shapes raises; torch would log that as an error besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # a level would empty the caches of all loggers
    try:
        yield
    finally:
        logger.disabled = before


def forms_of(inventory: Inventory, name: str) -> Iterator[Form]:
    """The reference of a Definition, then its spellings, each with the guards that apply to it."""
    shapes = declared(inventory.definition(name), inventory.shapes(name))
    yield Form("reference", inventory.reference(name), (shapes, *inventory.guards(name)))
    for spelling in inventory.spellings(name).values():
        yield Form(spelling.name, spelling.function, (shapes, *spelling.guards), defaults(spelling.function))


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a spelling that have a default: it is written for these values alone."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


class FormPatterns:
    """The Patterns of one form, traced when they are asked for: a trace takes as long as a search of a layer.

    Args:
        definition: What the form computes.
        form: The function.
    """

    def __init__(self, definition: Definition, form: Form):
        self.form = form
        self._definition = definition
        self._known: dict[Probe, _Traced | PatternError] = {}

    @cached_property
    def operations(self) -> frozenset[Any]:
        """What a graph must have for any of the Patterns to fit; one trace tells, as probes differ in views and casts.

        Raises:
            PatternError: If no probe can be traced.
        """
        failure: PatternError | None = None
        for probe in probes(self._definition):
            try:
                return operations_of(self._traced(probe).graph)
            except PatternError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """One Pattern for each probe at which the graph is another than before.

        A spelling may be written for a special case (one head per group): one probe that can trace it is enough.

        Raises:
            PatternError: If no probe can be traced, or an input is lost on the way.
        """
        found: dict[Any, Pattern] = {}
        failure: PatternError | None = None
        for probe in probes(self._definition):
            try:
                pattern = self._pattern(probe)
                found.setdefault(pattern.signature, pattern)
            except PatternError as error:
                failure = error
        if not found and failure is not None:
            raise failure
        return tuple(found.values())

    def _traced(self, probe: Probe) -> _Traced:
        if probe not in self._known:
            try:
                inputs = {**probe.inputs(self._definition), **self.form.fixed}
                self._known[probe] = _Traced(inputs, *trace(self.form.function, inputs))
            except (RuntimeError, TypeError, ValueError) as error:
                self._known[probe] = PatternError(f"{self._name} cannot be traced: {error}")
        known = self._known[probe]
        if isinstance(known, PatternError):
            raise known
        return known

    @property
    def _name(self) -> str:
        return f"{self._definition.name} ({self.form.name})"

    def _pattern(self, probe: Probe) -> Pattern:
        traced = self._traced(probe)
        numbers = {k: v for k, v in traced.inputs.items() if not isinstance(v, torch.Tensor)}
        scalars = {k: v for k, v in numbers.items() if k not in self.form.fixed}
        facts = graph_facts(traced.graph)
        nodes = {n: PatternNode(n.name, f, _literals(f, scalars, probe)) for n, f in facts.items()}
        captured = {v.name for p in nodes.values() for _, v in p.literals if isinstance(v, Captured)}
        lost = [s for s in scalars if s not in captured] + [t for t, n in traced.tensors.items() if not n.users]
        if lost:
            raise PatternError(f"{self._name} does not use its input {lost[0]!r} as such")
        parameters = tuple(self._definition.inputs)
        return _pattern(
            self._definition.name, self.form, parameters, traced.graph, traced.tensors, traced.outputs, nodes
        )


@dataclass(frozen=True)
class _Traced:
    """One form at one probe."""

    inputs: Mapping[str, Any]
    graph: Graph
    tensors: Mapping[str, Node]
    outputs: tuple[Node, ...]


def form_patterns(inventory: Inventory, name: str) -> tuple[FormPatterns, ...]:
    """The forms of one Definition, nothing of them traced yet."""
    return tuple(FormPatterns(inventory.definitions[name], form) for form in forms_of(inventory, name))


def merged(forms: Iterable[FormPatterns]) -> tuple[Pattern, ...]:
    """The distinct Patterns of forms of one Definition, each with all forms that trace to it.

    Raises:
        PatternError: If a form cannot be traced anywhere, or loses an input on the way.
    """
    found: dict[tuple[Any, ...], Pattern] = {}
    for pattern in (pattern for form in forms for pattern in form.patterns):
        known = found.setdefault(pattern.signature, pattern)
        if pattern.forms[0] not in known.forms:
            found[pattern.signature] = replace(known, forms=(*known.forms, *pattern.forms))
    return tuple(found.values())


def patterns_of(inventory: Inventory, name: str) -> tuple[Pattern, ...]:
    """The distinct Patterns of one Definition: the reference's first, then its spellings'.

    Raises:
        PatternError: If a reference or spelling cannot be traced anywhere, or loses an input on the way.
    """
    return merged(form_patterns(inventory, name))


def _literals(facts: Facts, scalars: Mapping[str, Any], probe: Probe) -> tuple[tuple[str, Any], ...]:
    names = {number: name for name, number in scalars.items()}
    out: list[tuple[str, Any]] = []
    for place, value in facts.literals:
        name = names.get(value) if isinstance(value, int | float) else None
        out.append((place, Captured(name) if name else value if probe.is_constant(value) else OPEN))
    return tuple(out)


def _pattern(
    definition: str,
    form: Form,
    parameters: tuple[str, ...],
    graph: Graph,
    tensors: Mapping[str, Node],
    outputs: tuple[Node, ...],
    nodes: Mapping[Node, PatternNode],
) -> Pattern:
    users = {n: tuple(u for u in n.users if u in nodes) for n in [*tensors.values(), *nodes]}
    scalars = tuple(p for p in parameters if p not in tensors and p not in form.fixed)
    named = {n: k for k, n in tensors.items()}
    return Pattern(definition, (form,), parameters, named, nodes, users, outputs, scalars, graph, form.fixed)


def specialize(pattern: Pattern, form: Form, inputs: Mapping[str, Any]) -> Pattern:
    """One form of the pattern traced at a place's own tensors and literals: every literal is fixed."""
    graph, tensors, outputs = trace(form.function, inputs)
    nodes = {n: PatternNode(n.name, f, f.literals) for n, f in graph_facts(graph).items()}
    return _pattern(pattern.definition, form, pattern.parameters, graph, tensors, outputs, nodes)
