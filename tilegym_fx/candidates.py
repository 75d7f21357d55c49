"""Who could compute an uncovered region: a Definition as it is, one with a small adapter, or nobody yet."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from tilegym_fx.adapters import Adapter
from tilegym_fx.errors import PatternError, TilegymFxError
from tilegym_fx.inventory.code import reference_function
from tilegym_fx.inventory.sizes import CannotTryError
from tilegym_fx.kernel_check import difference, random_inputs
from tilegym_fx.match import Matcher
from tilegym_fx.normalize.views import view_nodes
from tilegym_fx.pattern import Pattern, forms_of, patterns_of, trace
from tilegym_fx.results import Match, Site

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory
    from tilegym_fx.schema import Definition, Solution

Kind = Literal["exact", "compatible", "none"]
_MAX_TRIES = 400
#: What the search for one Definition's adapter may take: constant axes can make a region large.
_MAX_SECONDS = 10.0
_CAST = torch.ops.aten.to.dtype
_SEEDS = (0, 1)
_traced: WeakKeyDictionary[Inventory, dict[str, tuple[Pattern, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Candidate:
    """What can be done about a region.

    Attributes:
        kind: ``exact``, ``compatible`` or ``none``.
        definition: The Definition that fits, or nearly fits.
        solution: Its Solution; None where the Definition has none yet.
        adapter: What stands between a region and a Definition that nearly fits.
        why: In a sentence.
    """

    kind: Kind
    definition: str | None = None
    solution: str | None = None
    adapter: Adapter | None = None
    why: str = ""


def candidate_for(region: Definition, inventory: Inventory) -> Candidate:
    """The best candidate for a region.

    Args:
        region: A draft: its reference is the region's own code.
        inventory: Where to look.
    """
    try:
        graph, outputs = _graph_of(region)
    except (PatternError, CannotTryError) as error:
        return Candidate("none", why=f"its reference cannot be tried: {error}")
    exact = _exact(region, graph, outputs, inventory)
    if exact is not None:
        return exact
    work = _work(graph)
    for name in inventory.definitions:
        if name != region.name and work in _works_of(inventory, name):
            found = _compatible(region, inventory, name)
            if found is not None:
                return found
    return Candidate("none", why="no Definition does the same operations")


def _graph_of(region: Definition) -> tuple[Graph, tuple[Any, ...]]:
    run = reference_function(region.name, region.reference)
    inputs = random_inputs(region)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    try:
        graph, _, outputs = trace(run, fakes)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PatternError(f"the reference of {region.name} cannot be traced: {error}") from error
    return graph, outputs


def _exact(region: Definition, graph: Graph, outputs: tuple[Any, ...], inventory: Inventory) -> Candidate | None:
    """A Definition whose Pattern is the whole region."""
    patterns = [p for name in inventory.definitions if name != region.name for p in _patterns(inventory, name)]
    matches, _ = Matcher(inventory.definitions, patterns).match(graph, lambda node: Site())
    whole = {n for n in graph.nodes if n.op == "call_function"}
    for match in sorted(matches, key=lambda m: m.kind != "exact"):
        covers = whole == {*match.nodes, *match.shared} and set(outputs) == set(match.outputs)
        if covers and list(match.outputs) == list(outputs):
            solution = _usable(inventory, match, region)
            if solution is not None or not inventory.solutions_for(match.definition):
                name = solution.name if solution else None
                return Candidate("exact", match.definition, name, why=f"is {match.definition} ({match.spelling})")
    return None


def _patterns(inventory: Inventory, name: str) -> tuple[Pattern, ...]:
    """The Patterns of a Definition, traced once; none where it cannot be searched for."""
    known = _traced.setdefault(inventory, {})
    if name not in known:
        try:
            known[name] = patterns_of(inventory, name)
        except PatternError:
            known[name] = ()
    return known[name]


def _usable(inventory: Inventory, match: Match, region: Definition) -> Solution | None:
    """A Solution that is verified for the region's dtypes."""
    return next((s for s in inventory.solutions_for(match.definition) if _floats(region) <= _verified(s)), None)


def _floats(region: Definition) -> set[str]:
    return {s.dtype for s in region.inputs.values() if s.shape is not None and "float" in s.dtype}


def _verified(solution: Solution) -> set[str]:
    return set(solution.dtypes) or {"float32", "float16", "bfloat16"}


def _work(graph: Graph) -> frozenset[tuple[str, int]]:
    """The operations that compute something, with how often."""
    skipped = {*view_nodes(), _CAST}
    calls = (n.target for n in graph.nodes if n.op == "call_function" and n.target not in skipped)
    return frozenset(Counter(str(target).removeprefix("aten.").split(".")[0] for target in calls).items())


def _works_of(inventory: Inventory, name: str) -> set[frozenset[tuple[str, int]]]:
    return {_work(p.graph) for p in _patterns(inventory, name)}


def _compatible(region: Definition, inventory: Inventory, name: str) -> Candidate | None:
    """An adapter for one Definition under which both compute the same, or None."""
    definition = inventory.definitions[name]
    solutions = inventory.solutions_for(name)
    tensors = [k for k, s in definition.inputs.items() if s.shape is not None]
    mine = [k for k, s in region.inputs.items() if s.shape is not None]
    if not solutions or len(tensors) != len(mine) or len(definition.outputs) != len(region.outputs):
        return None
    run = reference_function(region.name, region.reference)
    reference = _guarded(inventory, name)
    samples = [(_Once(run), random_inputs(region, seed=seed)) for seed in _SEEDS]
    until = time.monotonic() + _MAX_SECONDS
    for adapter in islice(_adapters(region, definition, solutions[0]), _MAX_TRIES):
        if time.monotonic() > until:
            break
        if all(_agrees(once, reference, definition, adapter, inputs) for once, inputs in samples):
            why = f"is {name} with an adapter that {adapter.sentence().split('; ')[1].rstrip('.')}"
            return Candidate("compatible", name, solutions[0].name, adapter, why)
    return None


class _Once:
    """A function of one sample's inputs that is run once for each dtype they come in.

    Args:
        run: The function.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: dict[tuple[torch.dtype, ...], Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        key = tuple(v.dtype for v in inputs.values() if isinstance(v, torch.Tensor))
        if key not in self._known:
            self._known[key] = self._run(**inputs)
        return self._known[key]


def _guarded(inventory: Inventory, name: str) -> Any:
    """The reference of a Definition, which refuses what its guards refuse: its kernel would not do either."""
    parameters, form = list(inventory.definitions[name].inputs), next(forms_of(inventory, name))

    def guarded(*values: Any) -> Any:
        given = dict(zip(parameters, values, strict=True))
        for guard in form.guards:
            if (reason := guard(**given)) is not None:
                raise PatternError(reason)
        return form.function(*values)

    return guarded


def _agrees(run: Any, reference: Any, definition: Definition, adapter: Adapter, inputs: Mapping[str, Any]) -> bool:
    def adapted(**given: Any) -> Any:
        return adapter.apply(reference, definition, given)

    try:
        return not difference(run, adapted, inputs)
    except (IndexError, TilegymFxError):
        return False


def _adapters(region: Definition, definition: Definition, solution: Solution) -> Iterator[Adapter]:
    """Adapters to try, the least intrusive first."""
    tensors = [k for k, s in definition.inputs.items() if s.shape is not None]
    numbers = [k for k, s in definition.inputs.items() if s.shape is None]
    mine = [k for k, s in region.inputs.items() if s.shape is not None]
    ranks = {k: len(region.inputs[k].shape or ()) for k in mine}
    wide = max(ranks.values(), default=0)
    ones = tuple(k for k in mine if ranks[k] > 1 and _is_vector(region, k))
    values = [float(text) for text in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)", region.reference)]
    literals = [dict(zip(numbers, v, strict=True)) for v in product(dict.fromkeys(values), repeat=len(numbers))]
    casts = [""] if _floats(region) <= _verified(solution) else []
    casts += ["float32"] if "float32" in _verified(solution) else []
    for cast, dim, broadcast, flatten in product(
        casts, range(-1, -wide - 1, -1), (False, True), dict.fromkeys(((), ones))
    ):
        for order in permutations(mine):
            for scalars in literals:
                yield Adapter(dict(zip(tensors, order, strict=True)), scalars, broadcast, flatten, dim, cast)


def _is_vector(region: Definition, name: str) -> bool:
    """Whether all dimensions but the last have size 1."""
    axes = [region.axes[a] for a in region.inputs[name].shape or ()]
    return all(a.type == "const" and a.value == 1 for a in axes[:-1])
