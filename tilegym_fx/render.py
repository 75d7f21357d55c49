"""A survey as a person reads it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import folding
from .errors import UsageError, did_you_mean
from .folding import Folding
from .results import Match, Rejection
from .survey import PhaseSurvey, Survey, short, versions

_UNCOVERED_SHOWN = 12
_MISSES_SHOWN = 12
_ALL = " (all that it has positions for)"
_FILE = re.compile(r"(\S+\.py)(?=:\d)")


def print_survey(found: Survey, console: Console | None = None) -> None:
    """Header, then for each phase its Definitions, coverage, uncovered ops and near misses."""
    out = console or folding.console()
    v = versions()
    folding.show(
        f"[bold]{escape(found.source.name)}[/]  {found.class_name}, {found.parameters / 1e9:.2f} B parameters"
        f", {found.dtype} ({found.source.provenance})",
        out,
    )
    tokens = f"{found.seq} tokens{_ALL if found.shortened else ''}"
    folding.show(
        f"batch {found.batch}, {tokens}, times estimated for {found.device}; torch {v['torch']}, "
        f"transformers {v['transformers']}, tilegym_fx {v['tilegym-fx']}",
        out,
    )
    if found.source.quantised:
        folding.show(
            f"[bold]weights quantised ({escape(found.source.quantised)})[/] in the checkpoint, not here: a linear"
            " that a library quantises is left to it; all else matches as below",
            out,
        )
    place = _places(found)
    for phase in found.phases:
        _print_phase(phase, place, out)


def _places(found: Survey) -> Callable[[str], Folding]:
    """What shows a site: its file by name alone, unless two files that the survey speaks of share that name."""
    files = {file for phase in found.phases for where in _wheres(phase) for file in _FILE.findall(where)}
    names = Counter(file.split("/")[-1] for file in files)

    def named(file: re.Match[str]) -> str:
        name = file[1].split("/")[-1]
        return name if names[name] == 1 else file[1]

    return lambda where: Folding(_FILE.sub(named, where))


def _wheres(phase: PhaseSurvey) -> Iterator[str]:
    yield from (row.where for row in phase.definitions)
    yield from (row.where for row in phase.uncovered)
    yield from (row.where for row in phase.near_misses)


def _print_phase(phase: PhaseSurvey, place: Callable[[str], Folding], out: Console) -> None:
    out.print()
    if phase.error:
        folding.show(f"[bold]{phase.phase}[/]: {escape(phase.error)}", out)
        return
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phase.seconds.items())
    folding.show(f"[bold]{phase.phase}[/]: {phase.nodes} nodes; {stages}", out)
    for block, reason in phase.left_out.items():
        folding.show(f"[bold]{block} left out[/]: {escape(reason)}", out)
    folding.show(_definitions(phase, place), out)
    folding.show(f"estimated coverage [bold]{phase.coverage:.1%}[/] of {phase.milliseconds:.2f} ms", out)
    if phase.uncovered:
        folding.show(_uncovered(phase, place), out)
    if phase.near_misses:
        folding.show(_misses(phase, place), out)


def _definitions(phase: PhaseSurvey, place: Callable[[str], Folding]) -> Table:
    form = ("form",) if any(row.form for row in phase.definitions) else ()
    solution = ("Solution",) if any(row.solution != row.name for row in phase.definitions) else ()
    table = folding.table("Definition", "sites", "match", *form, *solution, "time", "first at")
    for row in phase.definitions:
        more = [row.form or ""] * len(form) + [Folding(row.solution or "-")] * len(solution)
        share = f"{row.time_share:.1%}"
        table.add_row(Folding(row.name), str(row.sites), row.kind, *more, share, place(row.where))
    return table


def _uncovered(phase: PhaseSurvey, place: Callable[[str], Folding]) -> Table:
    table = folding.table("op", "count", "time", "where", title="uncovered, by estimated time")
    for row in phase.uncovered[:_UNCOVERED_SHOWN]:
        table.add_row(Folding(row.op), str(row.count), f"{row.time_share:.2%}", place(row.where))
    rest = phase.uncovered[_UNCOVERED_SHOWN:]
    if rest:
        table.add_row(
            f"{len(rest)} more", str(sum(r.count for r in rest)), f"{sum(r.time_share for r in rest):.2%}", ""
        )
    return table


def _misses(phase: PhaseSurvey, place: Callable[[str], Folding]) -> Table:
    table = folding.table("Definition", "where", "why not", title="near misses")
    for row in phase.near_misses[:_MISSES_SHOWN]:
        table.add_row(Folding(row.definition), place(row.where), Folding(row.reason))
    if len(phase.near_misses) > _MISSES_SHOWN:
        table.add_row(f"{len(phase.near_misses) - _MISSES_SHOWN} more", "", "--json has them all")
    return table


def print_explanation(
    found: Survey, wanted: str, definitions: Collection[str] = (), console: Console | None = None
) -> None:
    """Every chosen Match and every Rejection of a Definition, or at a class, module path or source line.

    Args:
        found: The survey.
        wanted: Name of a Definition, or part of a place as the survey names it.
        definitions: Names that are right although nothing in this model comes near them.
        console: Where to print; by default standard output.

    Raises:
        UsageError: The model has no such place, and there is no such Definition.
    """
    _check_wanted(found, wanted, definitions)
    out = console or folding.console()
    for phase in found.phases:
        out.print(f"[bold]{phase.phase}[/]")
        if phase.outcome is None:
            out.print(f"  {escape(phase.error or '')}")
            continue
        lines = [_taken(p.match) for p in phase.outcome.chosen if _concerns(p.match, wanted)]
        lines += [_rejected(r) for r in phase.outcome.rejections if _concerns(r, wanted)]
        for line in dict.fromkeys(lines) or ["  nothing matches or comes near"]:
            out.print(escape(line), soft_wrap=True)


def _check_wanted(found: Survey, wanted: str, definitions: Collection[str]) -> None:
    names = set(_names(found))
    if wanted in definitions or any(wanted in name for name in names):
        return
    near = did_you_mean(wanted, {*names, *definitions})
    raise UsageError(
        f"nothing in {found.source.name} is called {wanted!r}",
        advice=f"Give a Definition, a class, a module path, a file or file:line{near}",
    )


def _names(found: Survey) -> Iterator[str]:
    """Of the places of a model: classes, module paths, and the places themselves."""
    for phase in found.phases:
        yield from _wheres(phase)
        if phase.outcome is not None:
            yield from (short(p.match.site) for p in phase.outcome.chosen)
            yield from (short(r.site) for r in phase.outcome.rejections)
        for path, module in phase.graph.model.named_modules() if phase.graph else ():
            yield from (path, type(module).__name__)


def _concerns(place: Match | Rejection, wanted: str) -> bool:
    return wanted == place.definition or wanted in short(place.site)


def _taken(match: Match) -> str:
    return f"  taken     {match.definition} ({match.spelling}, {match.kind}) at {short(match.site)}"


def _rejected(rejection: Rejection) -> str:
    where = short(rejection.site)
    return f"  not taken {rejection.definition} ({rejection.spelling}) at {where}: {rejection.reason}"
