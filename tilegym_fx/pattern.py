"""A Pattern: the searchable graph of a reference or a spelling, and which of its literals mean what.

The function is traced at two *probes* that differ in every size, every 16-bit dtype and every scalar. A
literal that is the same in both is part of the maths; one that equals a scalar input in both is that input,
captured; any other follows from shapes or dtypes, is left open in the search and settled by tracing again at
the matched inputs.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .errors import PatternError
from .facts import Facts, facts_of, graph_facts
from .normalize import normalize

if TYPE_CHECKING:
    from .inventory import Inventory
    from .schema import Definition, TensorSpec

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bool": torch.bool,
    "int64": torch.int64,
    "int32": torch.int32,
}


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
    """Trace ``function`` on fake tensors and literals to a graph in normal form.

    Returns:
        The graph, the placeholder of each tensor input, and the output nodes.
    """
    flowing = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor | torch.SymInt | torch.SymFloat)}

    def flat(*values: Any) -> Any:
        return function(**{**inputs, **dict(zip(flowing, values, strict=True))})

    with torch.no_grad(), torch._C._DisableAutocast(), _quiet_fake_tensors():
        graph = make_fx(flat, pre_dispatch=True)(*_apart(flowing.values())).graph
    placeholders = dict(zip(flowing, (n for n in graph.nodes if n.op == "placeholder"), strict=True))
    normalize(graph)
    result = next(iter(reversed(graph.nodes))).args[0]
    outputs = tuple(result) if isinstance(result, list | tuple) else (result,)
    return graph, {k: n for k, n in placeholders.items() if isinstance(inputs[k], torch.Tensor)}, outputs


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
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@cache
def _fake_mode() -> FakeTensorMode:
    """One mode for every probe: making one takes as long as a small trace."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class _Probe:
    """Sizes and dtypes to trace at; ``equal`` makes axes that divide each other the same (no groups)."""

    seed: int
    dtype: torch.dtype
    wide_weights: bool = False
    equal: bool = False

    def fake_inputs(self, definition: Definition) -> dict[str, Any]:
        axes = probe_axes(definition, self.seed, equal=self.equal)
        inputs: dict[str, Any] = {}
        for position, (name, spec) in enumerate(definition.inputs.items()):
            if spec.shape is None:
                inputs[name] = _number(spec, self.seed, position)
            else:
                shape = [axes[a] for a in spec.shape]
                inputs[name] = torch.empty(shape, dtype=self._dtype(spec.dtype, len(shape)), device="meta")
        mode = _fake_mode()
        with mode:
            return {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}

    def _dtype(self, declared: str, rank: int) -> torch.dtype:
        if declared not in ("bfloat16", "float16"):
            return _DTYPES[declared]
        return torch.float32 if self.wide_weights and rank == 1 else self.dtype


def _number(spec: TensorSpec, seed: int, position: int) -> float:
    """What the scalar input at a position is at a probe."""
    return seed + position if "int" in spec.dtype else 0.0625 * seed + 0.001 * position


def _probe_pairs(definition: Definition) -> Iterator[tuple[_Probe, _Probe]]:
    """16-bit, float32, and 16-bit with float32 norm weights; each with and without groups."""
    has_weight = any(spec.shape is not None and len(spec.shape) == 1 for spec in definition.inputs.values())
    has_groups = any((m := _DIVIDES.match(c)) and m[2] in definition.axes for c in definition.constraints or ())
    for low, other, wide in (
        (torch.bfloat16, torch.float16, False),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float16, True),
    ):
        for equal in (False, True):
            if (has_weight or not wide) and (has_groups or not equal):
                yield _Probe(3, low, wide, equal), _Probe(5, other, wide, equal)


#: The last resort, for operations that can be traced in bfloat16 alone.
_ONE_DTYPE = (_Probe(3, torch.bfloat16), _Probe(5, torch.bfloat16))

_SUM = re.compile(r"^(\w+) == (\w+) \+ (\w+)$")
_EQUALS = re.compile(r"^(\w+) == (?:(\d+) \* )?(\w+)$")
_DIVIDES = re.compile(r"^(\w+) % (\w+) == 0$")


def probe_axes(definition: Definition, seed: int, *, equal: bool = False) -> dict[str, int]:
    """Distinct even sizes for the axes of a Definition that satisfy its constraints.

    Args:
        definition: Whose axes.
        seed: Another odd seed gives another size for every axis.
        equal: Satisfy ``A % B == 0`` by ``A == B`` instead of ``A == seed * B``.

    Raises:
        PatternError: If a constraint has a form that is not understood.
    """
    axes: dict[str, int] = {}
    for position, (name, axis) in enumerate(definition.axes.items()):
        axes[name] = axis.value if axis.type == "const" else 2 * (seed + 2 * position + seed * position)
    scalars = {
        name: _number(spec, seed, i) for i, (name, spec) in enumerate(definition.inputs.items()) if not spec.shape
    }
    for constraint in definition.constraints or ():
        if (match := _DIVIDES.match(constraint)) and match[2] in scalars:
            axes[match[1]] = seed * int(scalars[match[2]])
        elif scalars.keys() & set(re.findall(r"\w+", constraint)):
            continue  # it limits what a call may give, not the sizes of the inputs
        elif match := _EQUALS.match(constraint):
            axes[match[1]] = int(match[2] or 1) * axes[match[3]]
        elif match := _SUM.match(constraint):
            axes[match[1]] = axes[match[2]] + axes[match[3]]
        elif match := _DIVIDES.match(constraint):
            divisor = axes.get(match[2]) or 2 * int(match[2])
            axes[match[1]] = divisor * (1 if equal and match[2] in axes else seed)
        else:
            raise PatternError(
                f"definition {definition.name}: constraint {constraint!r} has a form that is not understood",
                advice="Write `A == n * B`, `A == B + C` or `A % B == 0`",
            )
    return axes


def forms_of(inventory: Inventory, name: str) -> Iterator[Form]:
    """The reference of a Definition, then its spellings, each with the guards that apply to it."""
    yield Form("reference", inventory.reference(name), inventory.guards(name))
    for spelling in inventory.spellings(name).values():
        yield Form(spelling.name, spelling.function, spelling.guards, defaults(spelling.function))


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a spelling that have a default: it is written for these values alone."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def patterns_of(inventory: Inventory, name: str) -> tuple[Pattern, ...]:
    """The distinct Patterns of one Definition: the reference's first, then its spellings'.

    A spelling may be written for a special case (one head per group): one probe that can trace it is enough.

    Raises:
        PatternError: If a reference or spelling cannot be traced anywhere, or loses an input on the way.
    """
    definition = inventory.definitions[name]
    found: dict[tuple[Any, ...], Pattern] = {}
    for form in forms_of(inventory, name):
        built, failure = 0, None
        for pair in (*_probe_pairs(definition), _ONE_DTYPE):
            if built and pair is _ONE_DTYPE:
                continue
            try:
                pattern = _build(definition, form, pair)
            except PatternError as error:
                failure = error
                continue
            built += 1
            known = found.setdefault(pattern.signature, pattern)
            if form not in known.forms:
                found[pattern.signature] = replace(known, forms=(*known.forms, form))
        if not built and failure is not None:
            raise failure
    return tuple(found.values())


def _build(definition: Definition, form: Form, pair: tuple[_Probe, _Probe]) -> Pattern:
    where = f"{definition.name} ({form.name})"
    traced = []
    for probe in pair:
        inputs = {**probe.fake_inputs(definition), **form.fixed}
        try:
            traced.append((inputs, *trace(form.function, inputs)))
        except (RuntimeError, TypeError, ValueError) as error:
            raise PatternError(f"{where} cannot be traced: {error}") from error
    (inputs, graph, tensors, outputs), (other_inputs, other, *_) = traced
    numbers = {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor) and k not in form.fixed}
    scalars = {k: (v, other_inputs[k]) for k, v in numbers.items()}
    if len(_calls(graph)) != len(_calls(other)):
        raise PatternError(f"{where} traces to different graphs at different sizes")
    pairs = zip(_calls(graph), _calls(other), strict=True)
    nodes = {n: PatternNode(n.name, facts_of(n), _literals(facts_of(n), facts_of(m), scalars)) for n, m in pairs}
    captured = {v.name for p in nodes.values() for _, v in p.literals if isinstance(v, Captured)}
    lost = [s for s in scalars if s not in captured] + [t for t, n in tensors.items() if not n.users]
    if lost:
        raise PatternError(f"{where} does not use its input {lost[0]!r} as such")
    return _pattern(definition.name, form, tuple(definition.inputs), graph, tensors, outputs, nodes)


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _literals(one: Facts, two: Facts, scalars: Mapping[str, tuple[Any, Any]]) -> tuple[tuple[str, Any], ...]:
    out = []
    for (place, a), (_, b) in zip(one.literals, two.literals, strict=True):
        name = next((k for k, (x, y) in scalars.items() if a == x and b == y), None)
        out.append((place, Captured(name) if name else a if a == b else OPEN))
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
