"""What is asked of a record beyond the schema: one table of rules for each folder form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilegym_fx.inventory import definition_rules as d
from tilegym_fx.inventory import solution_rules as s
from tilegym_fx.schema import Definition, Problem, Solution

if TYPE_CHECKING:
    from tilegym_fx.inventory.collect import Entry

DefinitionRule = Callable[["Entry[Definition]"], Iterator[Problem]]
SolutionRule = Callable[["Entry[Solution]", "Definition | None"], Iterator[Problem]]


@dataclass(frozen=True)
class Rules:
    """The rules of one folder form.

    Attributes:
        definition: Run on every Definition.
        solution: Run on every Solution, together with its Definition if that could be read.
        ignore_unknown: Unknown keys are left out, as FlashInfer-Bench's own models do; else they are faults.
        inputs_in_order: The JSON has the inputs in the order of ``run``'s parameters; else they are put so.
        writes_marked: A reference writes only to inputs that say so (``inplace_output``).
        inputs_mean_something: Int tensors are offsets and indices that cannot be made up, so a reference that
            raises on made-up ones is no fault.
    """

    definition: tuple[DefinitionRule, ...]
    solution: tuple[SolutionRule, ...]
    ignore_unknown: bool = False
    inputs_in_order: bool = False
    writes_marked: bool = True
    inputs_mean_something: bool = False


REPOSITORY = Rules(
    definition=(
        d.definition_file,
        d.exact_parameters,
        d.inputs_only_read,
        d.sources_cited,
        d.fused_cites_every_region,
        d.definition_tags,
        d.axes_used,
    ),
    solution=(
        s.solution_file,
        s.cuda_tile,
        s.in_kernels,
        s.sources_exist,
        s.sources_complete,
        s.entry_point_exists,
        s.entry_point_signature,
        s.solution_tags,
    ),
    inputs_in_order=True,
)
FLASHINFER_TRACE = Rules(
    definition=(),
    solution=(s.sources_embedded, s.entry_point_exists),
    ignore_unknown=True,
    writes_marked=False,
    inputs_mean_something=True,
)
TILEGYM = Rules(definition=(d.sources_cited,), solution=(s.sources_exist, s.entry_point_exists))
