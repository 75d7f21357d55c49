"""A run as one HTML page that needs nothing else: coverage, experiments, kernels beside Definitions."""

from __future__ import annotations

import html
import json
from pathlib import Path

from .charts import bars, timeline
from .ledger import Ledger, Row, shown, slug

_STYLE = """
:root { --ours: #2a7d4f; --rest: #c9ced6; --bad: #b3432f; --ink: #1c2128; --soft: #5b6472; --line: #dfe3e8; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; max-width: 1180px;
  padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
.soft { color: var(--soft); font-size: 13px; }
.bar { display: flex; height: 30px; border-radius: 4px; overflow: hidden; background: var(--rest); }
.bar span { display: flex; align-items: center; padding-left: 8px; color: white; font-size: 13px; min-width: 2px;
  overflow: hidden; white-space: nowrap; border-right: 1px solid white; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; margin: 10px 0 0; padding: 0;
  font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.legend .rest { background: var(--rest); }
.two { display: grid; grid-template-columns: 90px 1fr 70px; gap: 8px 12px; align-items: center; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td:nth-child(n+3):nth-child(-n+4), td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 6px 8px; border-bottom: 1px solid var(--line); vertical-align: top; }
.keep { color: var(--ours); font-weight: 600; } .discard { color: var(--soft); }
.crash, .timeout { color: var(--bad); font-weight: 600; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 10px 0; }
summary { padding: 10px 14px; cursor: pointer; font-weight: 600; }
.pair { display: grid; grid-template-columns: 2fr 3fr; border-top: 1px solid var(--line); }
.pair > div { min-width: 0; padding: 10px 14px; } .pair > div + div { border-left: 1px solid var(--line); }
pre { overflow: auto; font: 12px/1.45 ui-monospace, monospace; margin: 0; max-height: 640px; }
polyline { fill: none; stroke-width: 2; stroke: var(--ours); }
polyline.speed { stroke: #7a86c8; stroke-dasharray: 5 4; }
.grid { stroke: var(--line); }
.dot-keep { fill: var(--ours); } .dot-bad { fill: var(--bad); }
.dot-discard { fill: white; stroke: #8d96a3; stroke-width: 2; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr; } .pair > div + div { border-left: 0; } }
"""


def write_page(ledger: Ledger, root: Path, results: Path) -> Path:
    """Write the page of a run.

    Args:
        ledger: The run.
        root: Where the kernels are that were kept.
        results: The results folder, where drafts of the others are.

    Returns:
        The file.
    """
    file = results / f"{slug(ledger.model)}_report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(ledger, root, results), encoding="utf-8")
    return file


def page(ledger: Ledger, root: Path, results: Path) -> str:
    """The page's text."""
    parts = [
        f"<h1>{_e(ledger.model)}</h1>",
        _headline(ledger),
        f'<p class="soft">{_e("; ".join(f"{k}: {v}" for k, v in ledger.environment.items()))}</p>',
        "<h2>Coverage</h2>",
        bars(ledger.rows),
        "<h2>Experiments</h2>",
        timeline(ledger.rows),
        _table(ledger.rows),
        "<h2>Kernels</h2>",
        *(_kernel(row, _home(row, ledger, root, results), row.status == "keep") for row in ledger.rows if row.files),
        "<h2>What is left</h2>",
        _left(ledger),
    ]
    head = f'<meta charset="utf-8"><title>{_e(ledger.model)}: autokernelize</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en"><head>{head}{view}</head><body>{"".join(parts)}</body></html>\n'


def _headline(ledger: Ledger) -> str:
    """What became of it, in a sentence."""
    kept = [row for row in ledger.rows if row.status == "keep" and row.coverage is not None and row.throughput]
    if not kept:
        return "<p>There is no baseline.</p>"
    first, last = kept[0], kept[-1]
    tried, held = (sum(1 for row in ledger.rows if row.key and s in (row.status, "")) for s in ("", "keep"))
    times = (last.throughput or 0.0) / (first.throughput or 1.0)
    return (
        f"<p>Coverage <b>{first.coverage:.1%} → {last.coverage:.1%}</b>, throughput <b>{shown(first)} → "
        f"{shown(last)}</b> ({times:.2f}x). {held} of {tried} experiments were kept.</p>"
    )


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th>{t}</th>" for t in ("", "commit", "coverage", "throughput", "status", "description", "s"))
    return f"<table><tr>{head}</tr>{''.join(map(_row, rows))}</table>"


def _row(row: Row) -> str:
    coverage = "-" if row.coverage is None else f"{row.coverage:.2%}"
    cells = (str(row.number), row.commit[:10], coverage, shown(row))
    return (
        f"<tr>{''.join(f'<td>{_e(c)}</td>' for c in cells)}<td class='{row.status}'>{row.status}</td>"
        f"<td>{_e(row.told)}</td><td>{row.seconds:.0f}</td></tr>"
    )


def _home(row: Row, ledger: Ledger, root: Path, results: Path) -> Path:
    """Where an experiment's files are: in the inventory if it was kept, else among the drafts."""
    return root if row.status == "keep" else results / slug(ledger.model) / f"{row.number:03}"


def _kernel(row: Row, home: Path, is_kept: bool) -> str:
    reference = _reference(home, row)
    kernel = next((home / f for f in row.files if f.startswith("kernels/")), None)
    source = kernel.read_text(encoding="utf-8") if kernel is not None and kernel.is_file() else "not written"
    opened = " open" if is_kept else ""
    return (
        f"<details{opened}><summary><span class='{row.status}'>{row.status}</span> {_e(row.name)}"
        f" <span class='soft'>{_e(row.region)}</span></summary>"
        f"<div class='pair'><div><p class='soft'>Definition</p><pre>{_e(reference)}</pre></div>"
        f"<div><p class='soft'>Kernel</p><pre>{_e(source)}</pre></div></div></details>"
    )


def _reference(home: Path, row: Row) -> str:
    file = home / "definitions" / f"{row.name}.json"
    if not file.is_file():
        return "in another inventory"
    record = json.loads(file.read_text(encoding="utf-8"))
    shapes = [
        f"{kind} {name}: {spec['shape']} {spec['dtype']}"
        for kind in ("inputs", "outputs")
        for name, spec in record[kind].items()
    ]
    return "\n".join([record["description"], "", *shapes, "", record["reference"]])


def _left(ledger: Ledger) -> str:
    slow = "".join(f"<tr><td>{_e(where)}</td><td>{1e6 * s:,.1f} us</td></tr>" for where, s in ledger.uncovered)
    passed = "".join(f"<li>{_e(why)}</li>" for why in ledger.passed_over.values())
    return f"<table>{slow}</table><h2>Passed over</h2><ul>{passed or '<li>nothing</li>'}</ul>"


def _e(text: object) -> str:
    return html.escape(str(text))
