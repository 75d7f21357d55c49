"""What a run has tried: the table for people, and the state from which it goes on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["keep", "discard", "timeout", "crash"]


@dataclass(frozen=True)
class Row:
    """One experiment.

    Attributes:
        number: 0 is the baseline.
        status: What became of it.
        description: What was tried, and for a discard why it was not kept.
        commit: Where it can be found; ``-`` if it was not committed.
        coverage: With its kernel in place; None where that is unknown.
        throughput: The same.
        noise: By how much that may be off, as a share; None where it was not measured, or not written down.
        note: Why the host's time is in it.
        name: Of the Definition.
        kind: What candidate there was.
        region: The region's place.
        key: The region's code.
        seconds: What the experiment took.
        files: What was written, relative to the root.
    """

    number: int
    status: Status
    description: str
    commit: str = "-"
    coverage: float | None = None
    throughput: float | None = None
    name: str = ""
    kind: str = ""
    region: str = ""
    key: str = ""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    noise: float | None = None
    note: str = ""

    @property
    def told(self) -> str:
        """The description, with what a reader of the figures has to know."""
        return f"{self.description} ({self.note})" if self.note else self.description


@dataclass
class Ledger:
    """A run.

    Attributes:
        model: Its model.
        environment: What figures depend on.
        rows: The experiments.
        head: The commit of the last one kept.
        running: Number of the experiment in progress; a run that was killed leaves it here.
        passed_over: Region -> why it cannot be tried.
        uncovered: The slowest regions that are left.
    """

    model: str
    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    head: str = ""
    running: int | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    uncovered: list[tuple[str, float]] = field(default_factory=list)

    @property
    def tried(self) -> tuple[str, ...]:
        """Regions that have had their turn."""
        return tuple(row.key for row in self.rows if row.key)

    @property
    def last_kept(self) -> Row:
        """The row whose coverage the next experiment has to beat."""
        return next(row for row in reversed(self.rows) if row.status == "keep")

    @property
    def fastest_kept(self) -> Row:
        """The row whose throughput it has to hold: drops that are within the noise one by one must not add up."""
        kept = [row for row in self.rows if row.status == "keep"]
        baseline = max((i for i, row in enumerate(kept) if not row.key), default=0)  # later ones are of another tree
        return max(kept[baseline:], key=lambda row: row.throughput or 0.0)

    def in_vain(self) -> int:
        """How many experiments since the last one kept."""
        count = 0
        for row in reversed(self.rows):
            if row.status == "keep":
                break
            count += 1
        return count


def slug(model: str) -> str:
    """The model's name as part of a file name.

    A function is named with its file, and with what tells that from a file of the same name in another folder.
    """
    path, _, function = model.partition("::")
    if function:
        where = hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:6]
        model = f"{Path(path).stem}.{function}-{where}"
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in model)


def state_file(results: Path, model: str) -> Path:
    """Where a run's state is."""
    return results / slug(model) / "state.json"


def table_file(results: Path, model: str) -> Path:
    """Where a run's table is."""
    return results / f"{slug(model)}_results.md"


def read(results: Path, model: str) -> Ledger | None:
    """The state of an earlier run; None where there was none."""
    file = state_file(results, model)
    if not file.is_file():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "files": tuple(row["files"])}) for row in fields.pop("rows")]
    fields["uncovered"] = [tuple(pair) for pair in fields["uncovered"]]
    return Ledger(rows=rows, **fields)


def save(ledger: Ledger, results: Path) -> None:
    """Write the state and the table; a reader never sees half of either."""
    for file, text in (
        (state_file(results, ledger.model), json.dumps(asdict(ledger), indent=1)),
        (table_file(results, ledger.model), table(ledger)),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.new")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, file)


def table(ledger: Ledger) -> str:
    """The table of results as Markdown."""
    figures = ledger.environment.get("figures", "")
    noise = " ± is how far a throughput may be off." if any(row.noise is not None for row in ledger.rows) else ""
    lines = [
        f"# {ledger.model}",
        "",
        *(f"- {name}: {value}" for name, value in ledger.environment.items()),
        "",
        f"Coverage and throughput are {figures}.{noise}",
        "",
        "| commit | cuTile coverage | cuTile throughput | status | description |",
        "|---|---|---|---|---|",
        *(_line(row) for row in ledger.rows),
    ]
    return "\n".join(lines) + "\n"


def shown(row: Row) -> str:
    """The throughput, with its noise where that is known."""
    if row.throughput is None:
        return "-"
    return f"{row.throughput:,.1f}" + ("" if row.noise is None else f" ± {row.noise:.1%}")


def _line(row: Row) -> str:
    coverage = "-" if row.coverage is None else f"{row.coverage:.2%}"
    cells = (
        row.commit[:10],
        coverage,
        shown(row),
        row.status,
        row.told.replace("|", "/").replace("\n", " "),
    )
    return f"| {' | '.join(cells)} |"


def as_dict(ledger: Ledger) -> dict[str, Any]:
    """The whole run, for the page."""
    return asdict(ledger)
