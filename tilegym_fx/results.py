"""The in-memory records handed from stage to stage: frozen, and ignorant of how they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.fx import Node

MatchKind = Literal["exact", "compatible"]
Phase = Literal["prefill", "decode"]
#: Where a planned Match can be put: into the model's own source, into a rewritten graph alone, or into both.
Form = Literal["source", "graph", "both"]

#: What an input of a Definition is bound to in a matched graph: a node, or a literal the pattern captured.
Binding = "Node | bool | int | float | None"
#: How the first line of an emitted text ends.
WRITTEN_BY = "with cuTile kernels, written by tilegym_fx."
#: The number that torch.fx puts behind a node's name, or a list's in the path of a module.
_NUMBERED = re.compile(r"(?<=[A-Za-z0-9])_\d+(?=_|\b)|(?<=\.)\d+(?=\.[A-Za-z_])")


@dataclass(frozen=True)
class Frame:
    """One Python frame that was active when a node was traced."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File and line, the file from its package on: where packages are installed says nothing about a model."""
        parts = self.file.replace("\\", "/").split("/")
        installed = next((name for name in ("site-packages", "dist-packages") if name in parts), None)
        shown = parts[parts.index(installed) + 1 :] if installed else parts[-1:]
        return f"{'/'.join(shown)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}"


@dataclass(frozen=True)
class Site:
    """Where in the model's source a value is computed.

    Attributes:
        module_path: Dotted path of the innermost module (``model.layers.0.mlp``), empty for the root.
        module_class: Class name of that module.
        frames: Model-code frames, outermost first.
    """

    module_path: str = ""
    module_class: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def innermost(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    def __str__(self) -> str:
        place = self.innermost.place if self.innermost else "no source line"
        if not self.module_path and not self.module_class:
            return place
        name = self.module_class or "?"
        return f"{self.module_path or name} ({name}) {place}"


@dataclass(frozen=True)
class Match:
    """A place in a normalised graph that computes a Definition.

    Attributes:
        definition: Name of the Definition.
        spelling: Name of the pattern that fitted: ``reference`` or the function name of a spelling.
        kind: ``exact`` if every tensor has the Definition's own dtype, else ``compatible``.
        inputs: Definition input name -> node or captured literal, in the Definition's order.
        outputs: The nodes whose values the Definition's outputs are, in the Definition's order.
        nodes: Every node that the replacement makes redundant, in graph order (outputs included).
        shared: Nodes that the pattern covers but that stay, as others read them too (views and casts only).
        site: Where the anchor node comes from.
        written: Place of an output -> the input over which the author's code writes it.
    """

    definition: str
    spelling: str
    kind: MatchKind
    inputs: Mapping[str, Node | bool | int | float | None]
    outputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    shared: tuple[Node, ...] = ()
    site: Site = field(default_factory=Site)
    written: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejection:
    """A place that nearly fitted, or fitted and was not taken, and why.

    Attributes:
        definition: Name of the Definition.
        spelling: Name of the pattern.
        why: Makes the one-sentence reason; called only when somebody reads it.
        nodes: The guilty nodes.
        depth: How many pattern nodes had matched: the larger, the nearer the miss.
        site: Where the first guilty node comes from.
    """

    definition: str
    spelling: str
    why: Callable[[], str]
    nodes: tuple[Node, ...]
    depth: int = 0
    site: Site = field(default_factory=Site)

    @property
    def reason(self) -> str:
        return self.why()


@dataclass(frozen=True)
class PlannedMatch:
    """A Match that will be rewritten.

    Attributes:
        match: The place.
        solution: Name of the Solution that will run it, or None when only the reference can.
        seconds_before: Estimated time of the region as the model's author wrote it.
        seconds_after: Estimated time of the one kernel that replaces it.
    """

    match: Match
    solution: str | None
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True)
class Plan:
    """The chosen, non-overlapping Matches in graph order; every loser is a Rejection."""

    chosen: tuple[PlannedMatch, ...]
    rejections: tuple[Rejection, ...]


@dataclass(frozen=True)
class Written:
    """One Match that the emitted text runs as a kernel.

    Attributes:
        match: The Match.
        module_path: Path of the module whose method holds the call.
        module_class: Class of that module.
        method: Name of the method.
        file: Source file of the method.
        line: Line of the statement that was replaced.
        column: Where in its line the replaced expression begins.
        guards: Conditions under which the call is made; empty when always.
        part: Which call it is, where several stand in the place of one statement.
    """

    match: Match
    module_path: str
    module_class: str
    method: str
    file: str
    line: int
    column: int
    guards: tuple[str, ...] = ()
    part: int = 0


@dataclass(frozen=True)
class EmitResult:
    """An emitted module.

    Attributes:
        text: The Python text; empty when nothing could be written.
        written: The Matches in it.
        refused: The Matches that are not, with the reasons.
    """

    text: str
    written: tuple[Written, ...]
    refused: tuple[Rejection, ...]


def misses(rejections: Iterable[Rejection]) -> list[str]:
    """The reasons, each once with its first place; what another match overlaps is no miss.

    Nearest first, and those without a line of source last: nobody could look at their place.

    Reasons are the same where they differ in nothing but the numbers of nodes and layers.
    """
    first: dict[tuple[str, str], Rejection] = {}
    places: dict[tuple[str, str], set[str]] = {}
    for rejection in sorted(rejections, key=lambda r: (r.site.innermost is None, -r.depth)):
        reason = rejection.reason
        if not reason.startswith("overlaps "):
            key = rejection.definition, _NUMBERED.sub("", reason)
            first.setdefault(key, rejection)
            places.setdefault(key, set()).add(str(rejection.site))
    return [f"{r.definition} at {_first_of(r.site, len(places[key]))}: {r.reason}" for key, r in first.items()]


def _first_of(site: Site, count: int) -> str:
    return f"{site} and {count - 1} more place{'s' * (count > 2)}" if count > 1 else str(site)


def places(count: int, runs: str) -> str:
    """How many places a report is about, and what they run; ``runs`` is empty where nothing runs yet."""
    some = f"{count} place{'' if count == 1 else 's'}"
    return f"{some} run{'s' if count == 1 else ''} {runs}" if runs and count else f"{some} that kernels can compute"


def told(found: list[str], shown: int, more: str) -> list[str]:
    """The first of the misses as lines of a report, and where to ask for the others."""
    rest = [f"  and {len(found) - shown} more in {more}"] if len(found) > shown else []
    return [f"  not: {line}" for line in found[:shown]] + rest
