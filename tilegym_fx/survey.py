"""What the pass would do to a whole model, in both phases of ``generate()``: the library side of ``scan``."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

import tilegym_fx

from .errors import ExportError
from .export import ExportedGraph, build, export_phase, longest, site_of
from .forms import Forms, find_forms
from .model_source import ModelSource, resolve_model
from .pipeline import Outcome, find
from .plan import Policy
from .results import Form, MatchKind, Phase, PlannedMatch, Rejection, Site

if TYPE_CHECKING:
    from .inventory import Inventory

_DEFAULT_SEQ = 2048
PHASES: tuple[Phase, ...] = ("prefill", "decode")
_PACKAGES = ("torch", "transformers", "cuda-tile")


@dataclass(frozen=True)
class DefinitionRow:
    """One Definition in one phase."""

    name: str
    op_type: str
    sites: int
    kind: MatchKind
    solution: str | None
    time_share: float
    where: str
    form: Form | None = None


@dataclass(frozen=True)
class UncoveredRow:
    """One operation at one line of the model's source that no kernel takes."""

    op: str
    count: int
    time_share: float
    where: str


@dataclass(frozen=True)
class MissRow:
    """The nearest miss of one Definition in one class of module."""

    definition: str
    where: str
    reason: str


@dataclass(frozen=True)
class PhaseSurvey:
    """One phase of the model; ``failure`` says why there is nothing else."""

    phase: Phase
    nodes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    coverage: float = 0.0
    milliseconds: float = 0.0
    definitions: tuple[DefinitionRow, ...] = ()
    uncovered: tuple[UncoveredRow, ...] = ()
    near_misses: tuple[MissRow, ...] = ()
    failure: ExportError | None = None
    outcome: Outcome | None = None
    graph: ExportedGraph | None = None

    @property
    def error(self) -> str | None:
        return str(self.failure) if self.failure else None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Class of a block that could not be captured, and is one operation that no kernel takes -> why."""
        return self.graph.holes if self.graph else {}


@dataclass(frozen=True)
class Survey:
    """A model and its phases; ``shortened`` if it has fewer positions than a scan takes by itself."""

    source: ModelSource
    class_name: str
    parameters: int
    device: str
    batch: int
    seq: int
    dtype: str
    phases: tuple[PhaseSurvey, ...]
    shortened: bool = False

    @property
    def sites(self) -> int:
        """Matched places over all phases."""
        return sum(row.sites for phase in self.phases for row in phase.definitions if row.form != "source")


def versions() -> dict[str, str]:
    """The versions that a report depends on."""
    packages = {package: _version(package) for package in _PACKAGES}
    own = {"python": platform.python_version(), "tilegym-fx": tilegym_fx.__version__}  # which need not be installed
    return {**own, **packages, "torch": torch.__version__}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def survey(
    name: str,
    inventory: Inventory,
    policy: Policy,
    *,
    batch: int = 1,
    seq: int | None = None,
    dtype: str | torch.dtype | None = None,
    phases: Sequence[Phase] = PHASES,
    trust_remote_code: bool = False,
    forms: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Survey:
    """Build the model without weights, capture it, and run the pass on it.

    Args:
        name: A hub id, folder, model type or id of the shipped table.
        inventory: Whose Definitions to look for.
        policy: Device, ``only`` and ``skip``.
        batch: Sequences.
        seq: Tokens of the prompt, and entries of the cache in decode; by default 2048, or what the model has
            positions for.
        dtype: Of the parameters; by default that of the checkpoint, see :meth:`ModelSource.dtype_for`.
        phases: Which ones.
        trust_remote_code: Whether code that comes with the configuration may run.
        forms: Whether to tell what of it can be written in source form; takes about half as long again.
        progress: Called with a short text before each step.

    Raises:
        UnknownModelError: The model cannot be found or built.
        ExportError: No phase can be captured.
    """
    progress(f"reading the configuration of {name}")
    source = resolve_model(name, trust_remote_code=trust_remote_code)
    progress("building it without weights")
    taken = source.dtype_for(dtype)
    model = build(source.config, taken, trust_remote_code=trust_remote_code)
    surveyed, lengths = [], []
    for phase in phases:
        progress(f"exporting {phase}")
        length = _length(model, phase) if seq is None else seq
        lengths.append(length)
        surveyed.append(_survey_phase(model, phase, inventory, policy, batch, length, forms))
    failures = [s.failure for s in surveyed if s.failure]
    if len(failures) == len(surveyed):
        raise ExportError.because(f"no phase of {name} can be captured", failures[0])
    return Survey(
        source,
        type(model).__name__,
        _parameters(model),
        policy.device.name,
        batch,
        max(lengths),
        str(taken).removeprefix("torch."),
        tuple(surveyed),
        shortened=seq is None and min(lengths) < _DEFAULT_SEQ,
    )


def _length(model: nn.Module, phase: Phase) -> int:
    limit = longest(model, phase)
    return _DEFAULT_SEQ if limit is None else min(_DEFAULT_SEQ, limit)


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _survey_phase(
    model: nn.Module, phase: Phase, inventory: Inventory, policy: Policy, batch: int, seq: int, forms: bool
) -> PhaseSurvey:
    try:
        if forms:
            return summarize(phase, *find_forms(model, phase, inventory, policy, batch, seq), inventory=inventory)
        exported = export_phase(model, phase, batch, seq)
    except ExportError as error:
        return PhaseSurvey(phase, failure=error)
    outcome = find(exported.graph_module.graph, inventory, policy, site_of, tell_waiting=True)
    return summarize(phase, exported, outcome, inventory=inventory)


def summarize(
    phase: Phase, exported: ExportedGraph, outcome: Outcome, forms: Forms | None = None, *, inventory: Inventory
) -> PhaseSurvey:
    """The rows that a person or a script reads of one phase."""
    total = outcome.seconds_total or 1.0
    instead = forms.only_in_source if forms else ()
    rows = [*_definition_rows(outcome.chosen, inventory, total, forms)]
    rows += _definition_rows(instead, inventory, total, forms)
    return PhaseSurvey(
        phase,
        outcome.nodes,
        {"export": exported.seconds, **outcome.seconds},
        outcome.coverage,
        1e3 * outcome.seconds_total,
        tuple(rows),
        tuple(_uncovered_rows(outcome.uncovered, total)),
        tuple(_miss_rows(outcome.rejections)),
        outcome=outcome,
        graph=exported,
    )


def _definition_rows(
    chosen: Sequence[PlannedMatch], inventory: Inventory, total: float, forms: Forms | None
) -> Iterable[DefinitionRow]:
    groups: dict[tuple[str, MatchKind, str | None, Form | None], list[PlannedMatch]] = defaultdict(list)
    for planned in chosen:
        form = forms.of(planned.match) if forms else None
        groups[planned.match.definition, planned.match.kind, planned.solution, form].append(planned)
    rows = []
    for (name, kind, solution, form), members in groups.items():
        share = sum(p.seconds_after for p in members) / total
        op_type, where = inventory.definitions[name].op_type, short(members[0].match.site)
        rows.append(DefinitionRow(name, op_type, len(members), kind, solution, share, where, form))
    return sorted(rows, key=lambda row: (-row.time_share, row.name, row.kind, row.form or ""))


def _uncovered_rows(uncovered: Sequence[tuple[Node, float]], total: float) -> Iterable[UncoveredRow]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for node, seconds in uncovered:
        groups[op_name(node), short(site_of(node), path=False)].append(seconds)
    rows = [UncoveredRow(op, len(times), sum(times) / total, where) for (op, where), times in groups.items()]
    return sorted(rows, key=lambda row: (-row.time_share, row.op, row.where))


def _miss_rows(rejections: Sequence[Rejection]) -> Iterable[MissRow]:
    """The deepest Rejection per Definition and class of module; what another match overlaps is no miss."""
    best: dict[tuple[str, str], Rejection] = {}
    for rejection in rejections:
        key = rejection.definition, rejection.site.module_class
        if key not in best or rejection.depth > best[key].depth:
            best[key] = rejection
    rows = [
        MissRow(r.definition, short(r.site), r.reason) for r in best.values() if not r.reason.startswith("overlaps ")
    ]
    return sorted(rows, key=lambda row: (row.definition, row.where))


def op_name(node: Node) -> str:
    """``aten.mul`` for ``aten.mul.Tensor``."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet if packet is not None else getattr(node.target, "__name__", node.target))


def short(site: Site, *, path: bool = True) -> str:
    """A site in one line: class of module, file from its package on, line; with ``path``, its path."""
    if path:
        return str(site)
    return f"{site.module_class or '?'} {site.innermost.place if site.innermost else 'no source line'}"


def as_json(found: Survey) -> dict[str, Any]:
    """The survey as the one object that ``scan --json`` prints."""
    return {
        "model": found.source.name,
        "model_type": found.source.model_type,
        "quantised": found.source.quantised,
        "class": found.class_name,
        "parameters": found.parameters,
        "device": found.device,
        "batch": found.batch,
        "seq": found.seq,
        "dtype": found.dtype,
        "versions": versions(),
        "phases": [_phase_json(phase) for phase in found.phases],
    }


def _phase_json(phase: PhaseSurvey) -> dict[str, Any]:
    if phase.error:
        return {"phase": phase.phase, "error": phase.error}
    return {
        "phase": phase.phase,
        "nodes": phase.nodes,
        "left_out": dict(phase.left_out),
        "seconds": {k: round(v, 4) for k, v in phase.seconds.items()},
        "coverage_estimated": round(phase.coverage, 6),
        "milliseconds_estimated": round(phase.milliseconds, 4),
        "definitions": [{k: v for k, v in vars(row).items() if k != "form" or v} for row in phase.definitions],
        "uncovered": [vars(row) for row in phase.uncovered],
        "near_misses": [vars(row) for row in phase.near_misses],
    }
