"""docs/coverage.md, written from the rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from .record import Row, is_captured
from .table import GOOD, cells, summary, totals

_SHOWN = 12
#: What the counts of the summary are meant to reach: at least this, of what is wrong at most.
_AIMS: Mapping[str, float] = {
    "exported": 190, "kernelized, equal and restored": 180, "wrong": 0, "median of the lower coverage": 0.95,
    f"lower coverage over {GOOD:.0%}": 150, "every norm, gated MLP and rotary place matched": 170,
}  # fmt: skip


def as_page(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The page."""
    return "\n".join(_lines(rows, versions)) + "\n"


def _lines(rows: Sequence[Row], versions: Mapping[str, str]) -> Iterator[str]:
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    yield "# Coverage of the causal language models of transformers"
    yield ""
    yield f"Written by `python -m tilegym_fx.scan --all` with {named}. Do not edit."
    yield ""
    yield "Nothing here ran on a GPU: coverage is the share of estimated time (roofline of an H200, batch 1, a"
    yield "prompt of up to 2,048 tokens, then one token against that cache) of the type's default configuration, with"
    yield "one layer of each kind standing for all of that kind; the lower phase counts. Places are counted from the"
    yield "graph, without the matcher. `kernelize` ran on a tiny random model on a CPU, where kernels are their PyTorch"
    yield "references: a prompt and four more tokens, then `restore`. *identical* is bit for bit, *equal* within the"
    yield "rounding of bfloat16. All Definitions with a kernel are considered here, also those that `kernelize` takes"
    yield "only when they are named, because their kernels have yet to run on a GPU."
    yield ""
    earlier = sum(row.applied > 0 and not row.definitions for row in rows)
    if earlier:
        yield f"{earlier} rows are of an earlier run with fewer Definitions: what they count is a lower bound."
        yield ""
    yield from _table(("", "count", "aim"), [_summed(name, value) for name, value in summary(rows).items()])
    yield ""
    yield "## By category"
    yield ""
    lines = [(name, f"{a} of {b}", f"{c} of {d}") for name, (a, b, c, d) in totals(rows).items()]
    yield from _table(("category", "places matched", "model types with every place matched"), lines)
    yield ""
    yield "## By model type"
    yield ""
    every = [cells(row) for row in rows]
    yield from _table(tuple(every[0]) if every else (), [tuple(line.values()) for line in every])
    yield ""
    yield from _reasons(rows)
    yield from _costly(rows)


def _summed(name: str, value: float) -> tuple[str, str, str]:
    """A count beside what it is meant to reach."""
    aim = _AIMS.get(name)
    if aim is None:
        return name, _number(value), ""
    reached = value <= aim if name == "wrong" else value >= aim
    return name, _number(value), f"{_number(aim)}, {'reached' if reached else 'missed'}"


def _number(value: float) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for line in lines:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    yield "## What did not work, and why"
    yield ""
    lines = []
    for row in rows:
        lines += [(row.model_type, phase, why) for phase, why in row.exported.items() if not is_captured(why)]
        lines += [(row.model_type, "kernelize", row.problem)] if row.problem else []
    yield from _table(("model type", "step", "reason"), lines)
    yield ""


def _costly(rows: Sequence[Row]) -> Iterator[str]:
    """Operations that stay outside of kernels, by the number of model types in which they cost something."""
    types: Counter[str] = Counter()
    shares: dict[str, float] = defaultdict(float)
    for row in rows:
        for op, share in row.uncovered:
            types[op] += share > 0.01
            shares[op] += share / max(1, len(rows))
    yield "## What no kernel takes"
    yield ""
    lines = [(f"`{op}`", str(count), f"{shares[op]:.1%}") for op, count in types.most_common(_SHOWN) if count]
    yield from _table(("operation", "model types with over 1% of prefill", "mean share of prefill"), lines)
