"""The loop: experiments one after another; what raises coverage and costs no throughput stays."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilegym_fx.errors import TilegymFxError, UsageError

from . import ledger as book
from .child import Answer, ask
from .experiment import TURN_FILE, Reply, Request
from .ledger import Ledger, Row
from .options import Options
from .repository import Repository
from .start import start
from .verdict import against, against_baseline


class InterruptedRunError(TilegymFxError):
    """Somebody pressed Ctrl-C."""

    advice = "Start it again with the same arguments: it goes on where it was"


def run(options: Options, say: Callable[[str], None]) -> Ledger:
    """Run the loop to its end, or go on with an earlier run.

    Args:
        options: What to do.
        say: Takes a line for each thing that happens.

    Raises:
        TilegymFxError: See :func:`tilegym_fx.autokernelize.start.start`, which comes first, and :func:`go_on`.
    """
    return go_on(options, *start(options), say)


def go_on(options: Options, repository: Repository, run_book: Ledger, say: Callable[[str], None]) -> Ledger:
    """Run the loop, from wherever it is, to its end.

    Args:
        options: What to do.
        repository: A clean tree.
        run_book: What has been tried.
        say: Takes a line for each thing that happens.

    Raises:
        UsageError: The baseline cannot be taken.
        InterruptedRunError: Ctrl-C; the tree is clean.
    """
    say(_where_commits_go(repository))
    with _interruptible(options, repository, run_book):
        if not run_book.rows or run_book.head != repository.head:
            _baseline(options, repository, run_book, say)
        while (why := _stop(options, run_book)) is None:
            if not _experiment(options, repository, run_book, say):
                why = "nothing is left to try"
                break
    say(f"stopped: {why}")
    return run_book


def _where_commits_go(repository: Repository) -> str:
    where = f"branch {repository.branch}" if repository.branch else "no branch (HEAD is detached)"
    return (
        f"every kept kernel is a commit on {where} of {repository.root}, in a dry run too\n"
        f"to take back what this run commits: git -C {shlex.quote(str(repository.root))} reset --hard {repository.head}"
    )


@contextmanager
def _interruptible(options: Options, repository: Repository, run_book: Ledger) -> Iterator[None]:
    """Leave a clean tree whatever ends the run, Ctrl-C and SIGTERM included."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except BaseException as error:
        if run_book.running is not None:
            repository.back_to(run_book.head)
            run_book.running = None
        if run_book.rows:  # a run without one would be a state that says nothing
            book.save(run_book, options.results)
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedRunError(f"interrupted; the tree is at {repository.head[:10]}") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _baseline(options: Options, repository: Repository, run_book: Ledger, say: Callable[[str], None]) -> None:
    """Experiment 0: the model as it is."""
    started = time.monotonic()
    answer = ask(_request(options, run_book, 0, baseline=True), options.limit, options.folder(0) / "log.txt")
    if answer.reply is None or answer.end != "answered":
        raise UsageError(f"the baseline of {options.model} cannot be taken: {answer.why}",
                         advice="Look at log.txt in the results folder")  # fmt: skip
    if why := against_baseline(answer.reply.figures):
        raise UsageError(f"nothing can be compared with the baseline of {options.model}: {why}",
                         advice="Run it when nothing else uses the GPU or the host")  # fmt: skip
    row = Row(len(run_book.rows), "keep", "baseline", repository.head, seconds=time.monotonic() - started)
    run_book.rows.append(_with_figures(row, answer.reply))
    run_book.head = repository.head  # not before: a run that ends without this baseline needs it when it goes on
    run_book.passed_over.clear()  # another tree may have what was missing
    _look(run_book, answer.reply)
    book.save(run_book, options.results)
    say(_told(run_book.rows[-1]))


def _experiment(options: Options, repository: Repository, run_book: Ledger, say: Callable[[str], None]) -> bool:
    """The next experiment; False if there is nothing left."""
    number = len(run_book.rows)
    run_book.running = number
    book.save(run_book, options.results)
    started = time.monotonic()
    answer = ask(_request(options, run_book, number), options.limit, options.folder(number) / "log.txt")
    if answer.reply is not None and answer.reply.status == "nothing":
        run_book.running = None
        _look(run_book, answer.reply)
        book.save(run_book, options.results)
        return False
    row = _settled(answer, repository, run_book, number, options.folder(number))
    run_book.rows.append(replace(row, seconds=time.monotonic() - started))
    run_book.running = None
    if answer.reply is not None and row.status == "keep":
        _look(run_book, answer.reply)
    book.save(run_book, options.results)
    say(_told(run_book.rows[-1]))
    return True


def _settled(answer: Answer, repository: Repository, run_book: Ledger, number: int, folder: Path) -> Row:
    """Keep or undo; gives the row."""
    reply = answer.reply
    if answer.end != "answered" or reply is None:
        key, name, region = _turn_of(folder)
        repository.back_to(run_book.head)
        status: book.Status = "timeout" if answer.end == "timeout" else "crash"
        tried = f"{name} at {region}: {answer.why}" if name else answer.why
        return Row(number, status, tried, key=key, name=name, region=region)
    row = Row(
        number,
        "discard",
        _description(reply),
        name=reply.name,
        kind=reply.kind,
        region=reply.where,
        key=reply.key,
        files=tuple(reply.files),
    )
    row = _with_figures(row, reply)
    if reply.files:
        files = [repository.root / file for file in reply.files]
        row = replace(row, commit=repository.commit(files, f"{reply.name} ({_origin(reply)})"))
    if why := against(reply, run_book):
        repository.back_to(run_book.head)
        return replace(row, description=f"{row.description}: {why}")
    run_book.head = repository.head
    return replace(row, status="keep")


def _turn_of(folder: Path) -> tuple[str, str, str]:
    """Which region a child was at that never answered: key, name and place."""
    file = folder / TURN_FILE
    if not file.is_file():
        return f"before-any-{folder.name}", "", ""
    fields = json.loads(file.read_text(encoding="utf-8"))
    return fields["key"], fields["name"], fields["where"]


def _with_figures(row: Row, reply: Reply) -> Row:
    if not reply.figures:
        return row
    found = reply.figures
    noise = found["noise"] if found["measured"] else None
    return replace(row, coverage=found["coverage"], throughput=found["throughput"], noise=noise, note=found["note"])


def _description(reply: Reply) -> str:
    return f"{reply.name} at {reply.where}, {reply.how or 'not written'}"


def _origin(reply: Reply) -> str:
    """Where a kernel comes from, for a commit's subject."""
    return reply.kind if reply.kind not in ("", "none") else reply.how or "no candidate"


def _look(run_book: Ledger, reply: Reply) -> None:
    run_book.passed_over.update(reply.passed_over)
    if reply.status != "nothing":  # which has tried nothing, so that all is as it was
        run_book.uncovered = [(where, seconds) for where, seconds in reply.uncovered]


def _stop(options: Options, run_book: Ledger) -> str | None:
    if len([row for row in run_book.rows if row.key]) >= options.most:
        return f"{options.most} experiments were made"
    if run_book.in_vain() >= options.patience:
        return f"nothing was kept in {options.patience} experiments"
    return None


def _request(options: Options, run_book: Ledger, number: int, *, baseline: bool = False) -> Request:
    return Request(
        options.model,
        str(options.root.resolve()),
        str(options.folder(number)),
        tuple(str(path.resolve()) for path in options.libraries),
        (*run_book.tried, *run_book.passed_over),
        options.device,
        options.dry_run,
        options.hook,
        options.limit,
        baseline,
        options.alone,
        options.layers,
        options.dtype,
    )


def _told(row: Row) -> str:
    coverage = "" if row.coverage is None else f" coverage {row.coverage:.2%}, throughput {book.shown(row)};"
    return f"{row.number}: {row.status};{coverage} {row.told}"
