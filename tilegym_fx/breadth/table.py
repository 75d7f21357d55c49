"""The rows as a person, a script and a page want them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .record import Row, is_captured
from .sites import CATEGORIES

#: Estimated coverage that counts as good.
GOOD = 0.85
_MUST = ("norm", "gated MLP", "rotary")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers that the whole is judged by."""
    lowest = [row.lowest_coverage for row in rows]
    return {
        "model types": len(rows),
        "exported": sum(row.is_exported for row in rows),
        "exported with blocks left out": sum(
            any(outcome.startswith("without ") for outcome in row.exported.values()) for row in rows
        ),
        "decode exported": sum(is_captured(row.exported.get("decode", "")) for row in rows),
        "kernelized, equal and restored": sum(row.is_right for row in rows),
        "kernelized": sum(row.applied > 0 for row in rows),
        "wrong": sum(row.verified is False for row in rows),
        "bit for bit equal": sum(row.is_right and row.difference == 0.0 for row in rows),
        "median coverage, prefill": _median([row.coverage.get("prefill", 0.0) for row in rows]),
        "median coverage, decode": _median([row.coverage.get("decode", 0.0) for row in rows]),
        "median of the lower coverage": _median(lowest),
        f"lower coverage over {GOOD:.0%}": sum(share > GOOD for share in lowest),
        "every norm, gated MLP and rotary place matched": sum(
            row.is_exported and all(row.every(name) for name in _MUST) for row in rows
        ),
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0


def totals(rows: Sequence[Row]) -> dict[str, tuple[int, int, int, int]]:
    """Category -> matched places, places, model types with all of them matched, model types with any."""
    found = {}
    for name in CATEGORIES:
        pairs = [row.places[name] for row in rows if name in row.places]
        whole = sum(ours == every for ours, every in pairs)
        found[name] = (sum(p[0] for p in pairs), sum(p[1] for p in pairs), whole, len(pairs))
    return found


def cells(row: Row) -> dict[str, str]:
    """One row of the table, by column."""
    places = {name: f"{row.places[name][0]}/{row.places[name][1]}" for name in CATEGORIES if name in row.places}
    return {
        "model type": row.model_type,
        "exported": _exported(row),
        **{name: places.get(name, "") for name in CATEGORIES},
        "prefill": _percent(row.coverage.get("prefill")),
        "decode": _percent(row.coverage.get("decode")),
        "kernelize": _kernelized(row),
        "s": f"{row.seconds:.0f}",
    }


def _exported(row: Row) -> str:
    if not row.is_exported:
        return "no"
    first = row.exported["prefill"]
    phases = "" if is_captured(row.exported.get("decode", "")) else ", prefill only"
    return f"{first}{phases}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _kernelized(row: Row) -> str:
    if row.verified is False:
        return "WRONG"
    if not row.applied:
        return "no"
    equal = "identical" if row.difference == 0.0 else "equal"
    return f"{row.applied} {equal}{'' if row.restored else ', NOT RESTORED'}"


def as_text(rows: Sequence[Row]) -> str:
    """A table for a terminal, then the summary."""
    lines = [cells(row) for row in rows]
    names = list(lines[0]) if lines else []
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in names}
    body = ["  ".join(line[name].ljust(widths[name]) for name in names).rstrip() for line in lines]
    head = "  ".join(name.ljust(widths[name]) for name in names)
    foot = [f"{name}: {value}" for name, value in summary(rows).items()]
    return "\n".join([head, *body, "", *foot])


def as_json(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """One object: versions, summary, and every row, a line each."""
    head = json.dumps({"versions": dict(versions), "summary": summary(rows)}, indent=1).removesuffix("\n}")
    return f'{head},\n "rows": [\n  ' + ",\n  ".join(row.line() for row in rows) + "\n ]\n}\n"


def as_csv(rows: Sequence[Row]) -> str:
    """The table as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(cells(Row(""))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells(row) for row in rows)
    return text.getvalue()
