"""The pictures of a run's page: coverage before and after as stacked bars, and the experiments one by one."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .ledger import Row

#: Shades of what was kept, in turn; the first is what kernels took before.
_SHADES = ("#1d5c3a", "#2f8a58", "#58b07f", "#3f7f9e", "#6aa5bf", "#8a7bbd", "#b3a6d9")
_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 230, 46, 150, 18, 34


def bars(rows: Sequence[Row]) -> str:
    """Before and after: what was covered, what each kept kernel has added, the rest; with a legend."""
    if not rows or rows[0].coverage is None:
        return "<p>There is no baseline.</p>"
    parts = gains(rows)
    total = sum(gain for _, gain in parts)
    return (
        f'<div class="two"><b>before</b>{_bar(parts[:1])}<span>{parts[0][1]:.2%}</span>'
        f"<b>after</b>{_bar(parts)}<span>{total:.2%}</span></div>{_legend(parts)}"
    )


def gains(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """What was covered before, and by how much each kept experiment has raised that."""
    parts = [("before", rows[0].coverage or 0.0)]
    last = parts[0][1]
    for row in rows[1:]:
        if row.status == "keep" and row.coverage is not None:
            parts.append((row.name or "baseline again", max(0.0, row.coverage - last)))
            last = max(last, row.coverage)
    return parts


def _bar(parts: Sequence[tuple[str, float]]) -> str:
    pieces = [
        f'<span style="width:{100 * gain:.2f}%;background:{_SHADES[i % len(_SHADES)]}" title="{_e(name)}: {gain:.2%}">'
        f"{_e(name) if gain > 0.12 else ''}</span>"
        for i, (name, gain) in enumerate(parts)
        if gain > 0
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'


def _legend(parts: Sequence[tuple[str, float]]) -> str:
    items = [
        f'<li><i style="background:{_SHADES[i % len(_SHADES)]}"></i>{_e(name)} <b>{"+" * (i > 0)}{gain:.2%}</b></li>'
        for i, (name, gain) in enumerate(parts)
        if gain > 0 or i == 0
    ]
    rest = 1 - sum(gain for _, gain in parts)
    return f'<ul class="legend">{"".join(items)}<li><i class="rest"></i>everything else <b>{rest:.2%}</b></li></ul>'


def timeline(rows: Sequence[Row]) -> str:
    """Coverage and throughput of the tree after each experiment, and what each experiment by itself came to."""
    step = (_WIDE - _LEFT - _RIGHT) / max(1, len(rows) - 1)
    best = max((row.throughput or 0.0 for row in rows if row.status == "keep"), default=0.0) or 1.0
    covered, fast = _as_kept(rows, "coverage"), [value / best for value in _as_kept(rows, "throughput")]
    xs = [_LEFT + i * step for i in range(len(rows))]
    dots = "".join(_dot(row, x, level) for row, x, level in zip(rows, xs, covered, strict=True))
    ends = ""
    if rows:
        ends = _end_label("coverage", f"{covered[-1]:.1%}", _y(covered[-1]), _y(fast[-1]) <= _y(covered[-1]))
        ends += _end_label("throughput", f"{fast[-1] * best:,.0f}", _y(fast[-1]), _y(fast[-1]) > _y(covered[-1]))
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="100%" role="img" aria-label="experiments over time">'
        f"{''.join(map(_grid, (0.0, 0.25, 0.5, 0.75, 1.0)))}"
        f'<polyline points="{_points(xs, fast)}" class="speed"/><polyline points="{_points(xs, covered)}"/>'
        f"{dots}{ends}</svg>"
        '<p class="soft">Lines: the tree after each experiment; solid coverage, dashed throughput, share of the best.'
        " Dots: green kept; hollow what a discarded one would have covered; red crashed or out of time.</p>"
    )


def _as_kept(rows: Sequence[Row], figure: str) -> list[float]:
    """The figure of the last kept experiment at each."""
    values: list[float] = []
    for row in rows:
        known = getattr(row, figure) if row.status == "keep" else None
        values.append(known if known is not None else values[-1] if values else 0.0)
    return values


def _dot(row: Row, x: float, level: float) -> str:
    title = f"<title>{_e(row.number)}: {_e(row.status)}, {_e(row.description)}</title>"
    at = level if row.status == "keep" or row.coverage is None else row.coverage
    kind = "bad" if row.status in ("crash", "timeout") else row.status
    return (
        f'<circle cx="{x:.1f}" cy="{_y(at):.1f}" r="5" class="dot-{kind}">{title}</circle>'
        f'<text x="{x:.1f}" y="{_HIGH - 10}" text-anchor="middle">{row.number}</text>'
    )


def _end_label(name: str, value: str, y: float, is_below: bool) -> str:
    """A line's name and value beside its end; of two lines that end together, one above and one below."""
    shift = 14 if is_below else -4
    return f'<text x="{_WIDE - _RIGHT + 10}" y="{y + shift:.1f}">{name} {value}</text>'


def _grid(share: float) -> str:
    y = _y(share)
    return (
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDE - _RIGHT}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    )


def _points(xs: Sequence[float], shares: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{_y(share):.1f}" for x, share in zip(xs, shares, strict=True))


def _y(share: float) -> float:
    return _TOP + (1 - min(1.0, share)) * (_HIGH - _TOP - _BOTTOM)


def _e(text: object) -> str:
    return html.escape(str(text))
