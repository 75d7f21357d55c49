"""The whole run: which types, what is known already, progress, and the files that come of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError, did_you_mean, make_folder, writing
from ..model_source import causal_model_types
from ..survey import versions
from .page import as_page
from .pool import judged
from .record import Row
from .table import as_csv, as_json, cells

#: The rows so far, the first line holding the versions that they were made with.
ROWS = "coverage.jsonl"


def run_all(
    folder: Path, only: Sequence[str] = (), *, jobs: int = 2, limit: float = 240.0, roots: Sequence[Path] = ()
) -> list[Row]:
    """Try every model type that the folder has no row of yet, and write the files.

    Args:
        folder: Gets ``coverage.jsonl``, ``.json``, ``.csv`` and ``.md``. A run that was stopped goes on there.
        only: Try these model types, whether there are rows of them or not.
        jobs: Worker processes at once.
        limit: Seconds for each model type.
        roots: Further inventory roots.

    Raises:
        UsageError: ``only`` names a type that is no causal language model, the folder cannot be written, or
            a number is not positive.
    """
    known = causal_model_types()
    strangers = sorted(set(only) - set(known))
    if strangers:
        raise UsageError(
            f"{strangers[0]!r} is no model type of a causal language model",
            advice=f"Without names, all are tried{did_you_mean(strangers[0], known)}",
        )
    if limit <= 0 or jobs < 1:
        raise UsageError(f"--limit {limit:g} and --jobs {jobs} leave nothing to run", advice="Give positive numbers")
    rows = _begun(folder)
    wanted = list(only) or [name for name in known if name not in rows]
    for done, row in enumerate(judged(wanted, jobs=jobs, limit=limit, roots=roots), 1):
        rows[row.model_type] = row
        _append(folder, row)
        print(f"[{done}/{len(wanted)}] {_progress(row)}", file=sys.stderr, flush=True)
    listed = [rows[name] for name in sorted(rows)]
    for suffix, text in (
        ("json", as_json(listed, versions())),
        ("csv", as_csv(listed)),
        ("md", as_page(listed, versions())),
    ):
        (folder / f"coverage.{suffix}").write_text(text, encoding="utf-8")
    return listed


def _begun(folder: Path) -> dict[str, Row]:
    """The rows in a folder, or an empty folder when they are of other versions."""
    path = folder / ROWS
    make_folder(folder)
    with writing(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and json.loads(lines[0]) == versions():
            rows = [Row.of_line(line) for line in lines[1:]]
            return {row.model_type: row for row in rows}
        path.write_text(json.dumps(versions()) + "\n", encoding="utf-8")
    return {}


def _append(folder: Path, row: Row) -> None:
    with (folder / ROWS).open("a", encoding="utf-8") as file:
        file.write(row.line() + "\n")


def _progress(row: Row) -> str:
    line = cells(row)
    shares = "/".join(filter(None, (line["prefill"], line["decode"]))) or "-"
    return f"{row.model_type}: {line['exported']}, covered {shares}, {line['kernelize']}, {line['s']} s" + (
        f" ({row.problem[:100]})" if row.problem else ""
    )


def dropped(rows: Sequence[Row], floor: Path) -> list[str]:
    """What is less than in an earlier ``coverage.json``, a line each.

    Raises:
        UsageError: The file holds no rows.
    """
    try:
        before = [Row.of_line(json.dumps(row)) for row in json.loads(floor.read_text(encoding="utf-8"))["rows"]]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{floor} holds no earlier rows", advice="Give a coverage.json of an earlier run") from error
    now = {row.model_type: row for row in rows}
    lines: list[str] = []
    for old in before:
        new = now.get(old.model_type)
        lines += [f"{old.model_type}: gone"] if new is None else _lost(old, new)
    return lines


def _lost(old: Row, new: Row) -> list[str]:
    counts: dict[str, tuple[int, int]] = {
        "exported": (old.is_exported, new.is_exported),
        "right": (old.is_right, new.is_right),
    }
    counts |= _pairs("matched", old.places, new.places) | _pairs("written", old.written, new.written)
    counts["places that run kernels"] = (old.applied, new.applied)
    return [f"{old.model_type}: {name} {a} -> {b}" for name, (a, b) in counts.items() if b < a]


def _pairs(
    what: str, old: Mapping[str, tuple[int, int]], new: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    return {f"{what} {name}": (pair[0], new.get(name, (0, 0))[0]) for name, pair in old.items()}
