"""A survey as a person reads it."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .results import Match, Rejection
from .survey import PhaseSurvey, Survey, short, versions

_FILE_WIDTH = 160
_UNCOVERED_SHOWN = 12
_ALL = " (all that it has positions for)"
_MISSES_SHOWN = 12


def _console() -> Console:
    """The terminal's width on a terminal, else wide enough for a source line in each row."""
    return Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)


def print_survey(found: Survey, console: Console | None = None) -> None:
    """Header, then for each phase its Definitions, coverage, uncovered ops and near misses."""
    out = console or _console()
    v = versions()
    out.print(
        f"[bold]{escape(found.source.name)}[/]  {found.class_name}, {found.parameters / 1e9:.2f} B parameters"
        f", {found.dtype} ({found.source.provenance})"
    )
    tokens = f"{found.seq} tokens{_ALL if found.shortened else ''}"
    out.print(
        f"batch {found.batch}, {tokens}, times estimated for {found.device}; torch {v['torch']}, "
        f"transformers {v['transformers']}, tilegym_fx {v['tilegym-fx']}"
    )
    for phase in found.phases:
        _print_phase(phase, out)


def _print_phase(phase: PhaseSurvey, out: Console) -> None:
    out.print()
    if phase.error:
        out.print(f"[bold]{phase.phase}[/]: {escape(phase.error)}")
        return
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phase.seconds.items())
    out.print(f"[bold]{phase.phase}[/]: {phase.nodes} nodes; {stages}")
    for block, reason in phase.left_out.items():
        out.print(f"[bold]{block} left out[/]: {escape(reason)}")
    out.print(_definitions(phase))
    out.print(f"estimated coverage [bold]{phase.coverage:.1%}[/] of {phase.milliseconds:.2f} ms")
    if phase.uncovered:
        out.print(_uncovered(phase))
    if phase.near_misses:
        out.print(_misses(phase))


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        numeric = column in ("sites", "time", "count")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _definitions(phase: PhaseSurvey) -> Table:
    with_forms = any(row.form for row in phase.definitions)
    forms = ("form",) if with_forms else ()
    table = _table("Definition", "sites", "match", *forms, "Solution", "time", "first at")
    for row in phase.definitions:
        form = (row.form or "",) if with_forms else ()
        share = f"{row.time_share:.1%}"
        table.add_row(row.name, str(row.sites), row.kind, *form, row.solution or "-", share, escape(row.where))
    return table


def _uncovered(phase: PhaseSurvey) -> Table:
    table = _table("op", "count", "time", "where", title="uncovered, by estimated time")
    for row in phase.uncovered[:_UNCOVERED_SHOWN]:
        table.add_row(row.op, str(row.count), f"{row.time_share:.2%}", escape(row.where))
    rest = phase.uncovered[_UNCOVERED_SHOWN:]
    if rest:
        table.add_row(
            f"{len(rest)} more", str(sum(r.count for r in rest)), f"{sum(r.time_share for r in rest):.2%}", ""
        )
    return table


def _misses(phase: PhaseSurvey) -> Table:
    table = _table("Definition", "where", "why not", title="near misses")
    for row in phase.near_misses[:_MISSES_SHOWN]:
        table.add_row(row.definition, escape(row.where), escape(row.reason))
    if len(phase.near_misses) > _MISSES_SHOWN:
        table.add_row(f"{len(phase.near_misses) - _MISSES_SHOWN} more", "", "--json has them all")
    return table


def print_explanation(found: Survey, wanted: str, console: Console | None = None) -> None:
    """Every chosen Match and every Rejection whose class, module path or source line contains ``wanted``."""
    out = console or _console()
    for phase in found.phases:
        if phase.outcome is None:
            continue
        out.print(f"[bold]{phase.phase}[/]")
        lines = [_taken(p.match) for p in phase.outcome.chosen if _concerns(short(p.match.site), wanted)]
        lines += [_rejected(r) for r in phase.outcome.rejections if _concerns(short(r.site), wanted)]
        for line in dict.fromkeys(lines):
            out.print(escape(line), soft_wrap=True)
        if not lines:
            out.print(f"  nothing at {escape(wanted)}: give a class, a module path, a file or file:line")


def _concerns(where: str, wanted: str) -> bool:
    return wanted in where


def _taken(match: Match) -> str:
    return f"  taken     {match.definition} ({match.spelling}, {match.kind}) at {short(match.site)}"


def _rejected(rejection: Rejection) -> str:
    where = short(rejection.site)
    return f"  not taken {rejection.definition} ({rejection.spelling}) at {where}: {rejection.reason}"
