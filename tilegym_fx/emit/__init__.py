"""The source form: planned Matches written into the model's own methods, as the text of
`modeling_<model>.py`.

`emit` decides for each Match which function holds it and what is written there, or why nothing is. The
result is one text; nothing is run or changed. `tilegym_fx.apply` binds it to a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx, nn

from ..layers import Copies
from ..provenance import Provenance
from ..results import EmitResult, Match, PlannedMatch, Rejection, Site, Written
from .collect import Alike, Collection, Placed
from .outcome import Refusal
from .outputs import Replacement
from .place import place
from .regions import Names
from .write import Header, write

_WRITES = "its results are written over its inputs, which is for graph form alone"

__all__ = ["Alike", "Emitter", "Header", "Refusal", "emit", "why_not"]


def why_not(match: Match, provenance: Provenance) -> str | None:
    """Why a Match cannot be written in source form by itself; None if it can.

    Args:
        match: A Match of the exported graph, normalised or not.
        provenance: The record of the export.
    """
    try:
        _placed(match, provenance)
    except Refusal as refusal:
        return str(refusal)
    return None


def emit(
    matches: Sequence[PlannedMatch | Match],
    provenance: Provenance,
    model: nn.Module,
    *,
    header: Header | None = None,
    more: Sequence[tuple[Sequence[PlannedMatch | Match], Provenance]] = (),
) -> EmitResult:
    """Writes the planned Matches into the methods of the model's modules.

    Args:
        matches: What to write, in graph order.
        provenance: The record of the export that the Matches were found in.
        model: The module that was exported.
        header: What the head of the text says; by default the model's class and the installed versions.
        more: Further captures of the same model (cached decode) with their Matches. A place that depends on a
            condition gets one branch per capture.

    Returns:
        The text and what became of each Match.
    """
    emitter = Emitter(model)
    for planned, record in ((matches, provenance), *more):
        emitter.add(planned, record)
    return emitter.result(header)


class Emitter:
    """Takes in one capture of a model after the other, and writes them all into one text.

    Args:
        model: The module whose methods are rewritten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._collection = Collection(model)
        self._refused: list[Rejection] = []
        self._solutions: dict[str, str | None] = {}

    def add(self, planned: Sequence[PlannedMatch | Match], record: Provenance) -> None:
        """Takes in the Matches of a capture of the whole model, in graph order."""
        for item in planned:
            match = item.match if isinstance(item, PlannedMatch) else item
            try:
                self._collection.add(_placed(match, record))
                self._note_solution(item)
            except Refusal as refusal:
                self._refused.append(_rejection(match, str(refusal), record))
        self._settle(record)

    def _settle(self, record: Provenance) -> None:
        self._refuse(self._collection.settle(record))

    def _refuse(self, dropped: Iterable[tuple[Placed, str]]) -> None:
        for placed, reason in dropped:
            made = placed.made
            self._refused.append(_rejection(made.match, reason, made.view.provenance))

    def _note_solution(self, item: PlannedMatch | Match) -> None:
        match, solution = (item.match, item.solution) if isinstance(item, PlannedMatch) else (item, None)
        self._solutions.setdefault(match.definition, solution)

    def conditional(self) -> list[Alike]:
        """The methods that choose between a kernel and their author's code, one for all modules alike.

        What a kernel is used for there depends on how the model is called: a batch with padding goes another
        way than one without. A capture of one module of each group, called in that way, tells for all of them.
        """
        return self._collection.conditional()

    def add_alike(self, alike: Alike, planned: Sequence[PlannedMatch | Match], record: Provenance) -> None:
        """Takes in what a capture of one module alone has found for the method of a group."""
        for item in planned:
            match = item.match if isinstance(item, PlannedMatch) else item
            try:
                if self._collection.add_alike(alike, _placed(match, record), record):
                    self._note_solution(item)
            except Refusal as refusal:
                self._refused.append(_rejection(match, str(refusal), record))

    def spread(self, copies: Copies) -> None:
        """Writes what was found in a layer into those that it stands for.

        Raises:
            Refusal: If what depends on one is not so in another.
        """
        self._collection.spread(copies)

    def result(self, header: Header | None = None) -> EmitResult:
        """The text and what became of each Match."""
        self._refuse(self._collection.drop_unwritable())
        text = write(self._collection, header or Header.of(self._collection.model), self._solutions)
        return EmitResult(text, tuple(_written(placed) for placed in self._collection.placed), tuple(self._refused))


def _placed(match: Match, provenance: Provenance) -> Replacement:
    """The replacement for a Match; looked for once, as planning asks first and emit then writes."""
    if match.written:
        raise Refusal(_WRITES)
    cache: dict[int, tuple[Match, Replacement | Refusal]] = provenance.__dict__.setdefault("_placed", {})
    if id(match) not in cache:
        try:
            cache[id(match)] = match, place(match, _names(match, provenance), provenance)
        except Refusal as refusal:
            cache[id(match)] = match, refusal
    found = cache[id(match)][1]
    if isinstance(found, Refusal):
        raise found
    return found


def _names(match: Match, provenance: Provenance) -> Names:
    graph: fx.Graph = match.outputs[0].graph
    cache: dict[int, Names] = provenance.__dict__.setdefault("_names_of", {})
    if id(graph) not in cache:
        cache[id(graph)] = Names(graph, provenance)
    return cache[id(graph)]


def _rejection(match: Match, reason: str, provenance: Provenance) -> Rejection:
    site = match.site if match.site.frames else _site(match, provenance)
    return Rejection(match.definition, match.spelling, lambda: reason, match.outputs, len(match.nodes), site)


def _site(match: Match, provenance: Provenance) -> Site:
    names = match.outputs[-1].meta.get("origins", (match.outputs[-1].name,))
    nodes: Mapping[str, fx.Node | None] = {name: provenance.node(name) for name in names}
    node = next((n for n in nodes.values() if n is not None), None)
    return provenance.site(node) if node is not None else Site()


def _written(placed: Placed) -> Written:
    made = placed.made
    return Written(
        made.match, placed.path, made.owner.cls.__name__, made.owner.name, made.view.call.code.co_filename,
        made.last.lineno, made.anchor.col_offset, tuple(made.facts.guards), made.part,
    )  # fmt: skip
