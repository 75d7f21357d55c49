"""In which form each planned Match exists: in the model's own source, in a rewritten graph alone, or in both.

A residual sum that ends one layer and the norm that begins the next meet only in the loop over layers: in the graph
they are one kernel, and in the source form their parts are planned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn
from torch.fx import Node

from .emit import why_not
from .errors import UsageError
from .export import ExportedGraph, phase_inputs, site_of
from .pipeline import Outcome, find
from .plan import Policy
from .provenance import Provenance, record
from .results import Form, Match, Phase, PlannedMatch

if TYPE_CHECKING:
    from .inventory import Inventory

Key = tuple[str, tuple[Node, ...]]


@dataclass(frozen=True)
class Forms:
    """The forms of one phase.

    Attributes:
        source: What is planned in source form.
        graph: What is planned in graph form.
    """

    source: Mapping[Key, PlannedMatch]
    graph: Mapping[Key, PlannedMatch]

    def of(self, match: Match) -> Form:
        """The form in which a planned Match exists."""
        key = _key(match)
        return "both" if key in self.source and key in self.graph else "source" if key in self.source else "graph"

    @property
    def only_in_source(self) -> tuple[PlannedMatch, ...]:
        """What the source form plans in the place of Matches that it cannot write."""
        return tuple(planned for key, planned in self.source.items() if key not in self.graph)


def find_forms(
    model: nn.Module, phase: Phase, inventory: Inventory, policy: Policy, batch: int, seq: int
) -> tuple[ExportedGraph, Outcome, Forms]:
    """Capture a phase with the record of its source, and plan it in both forms.

    Raises:
        ExportError: The phase cannot be captured.
        UsageError: This Python does not tell which expression a value comes from.
    """
    if sys.version_info < (3, 11):
        raise UsageError("forms cannot be told apart before Python 3.11", advice="Leave --forms out")
    exported, provenance = record(model, (), phase_inputs(model, phase, batch, seq))
    exported = replace(exported, phase=phase)
    graph = exported.copy()  # the record speaks of the exported one
    outcome = find(graph, inventory, policy, site_of, tell_waiting=True)
    written = find(graph, inventory, replace(policy, refuse=_refusal(provenance)), site_of)
    return exported, outcome, Forms(_by_key(written.chosen), _by_key(outcome.chosen))


def _refusal(provenance: Provenance) -> Callable[[Match], str | None]:
    return lambda match: why_not(match, provenance)


def _by_key(planned: tuple[PlannedMatch, ...]) -> dict[Key, PlannedMatch]:
    return {_key(p.match): p for p in planned}


def _key(match: Match) -> Key:
    return match.definition, match.outputs
