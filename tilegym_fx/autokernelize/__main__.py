"""``python -m tilegym_fx.autokernelize MODEL``: find uncovered code, write kernels, keep what helps."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tilegym_fx.errors import TilegymFxError, UsageError
from tilegym_fx.model_source import DTYPE_HELP, DTYPES
from tilegym_fx.new.scaffold import default_root

from . import ledger as book
from .loop import InterruptedRunError, go_on
from .options import Options
from .page import write_page
from .start import start

EXIT_OK, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 130
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {UsageError(message)}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = _Parser("python -m tilegym_fx.autokernelize", description=__doc__)
    p.add_argument(
        "model",
        metavar="MODEL",
        help="what scan takes, or FILE.py::function, which returns a module and its inputs",
    )
    p.add_argument("--root", type=Path, help="inventory in a git repository (default: this repository)")
    p.add_argument(
        "--results", type=Path, default=Path("sandbox"), metavar="DIR",
        help="where the table, the page and the drafts go (default: %(default)s, in the current folder); a run goes on"
        " where it was when it is started again with the same arguments, in the same folder",
    )  # fmt: skip
    p.add_argument("--time-limit", default="15m", metavar="T", help="for each experiment: 90s, 15m (default), 1h")
    p.add_argument("--max-experiments", type=int, default=20, metavar="N", help="default: %(default)s")
    p.add_argument(
        "--give-up-after", type=int, default=5, metavar="N",
        help="stop when nothing was kept in N experiments (default: %(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--library", type=Path, action="append", default=[], metavar="ROOT",
        help="another inventory to take kernels from; it is code, name only what you trust",
    )  # fmt: skip
    p.add_argument("--hook", default="", metavar="COMMAND", help="writes kernels; gets the draft's folder")
    p.add_argument("--dtype", choices=DTYPES, help=DTYPE_HELP)
    p.add_argument("--layers", type=int, metavar="N", help="the first N layers of the model only")
    p.add_argument("--init", action="store_true", help="make --root a git repository where it is in none")
    p.add_argument("--alone", action="store_true", help="without the shipped inventory: only --root counts")
    p.add_argument("--device", default="h200", help="whose figures a dry run estimates (default: h200)")
    p.add_argument("--dry-run", action="store_true", help="estimate instead of measuring; needs no GPU")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return _autokernelize(args)
    except InterruptedRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _autokernelize(args: argparse.Namespace) -> int:
    options = Options(
        args.model,
        args.root or default_root(),
        args.results,
        seconds_of(args.time_limit),
        args.max_experiments,
        args.give_up_after,
        tuple(args.library),
        args.device,
        args.dry_run,
        args.hook,
        args.alone,
        args.layers,
        args.init,
        args.dtype,
    )
    try:
        repository, run_book = start(options)
    except KeyboardInterrupt as error:
        raise InterruptedRunError("interrupted before anything was tried") from error
    try:
        go_on(options, repository, run_book, lambda line: print(line, flush=True))
    finally:  # what there is is shown, whatever has ended it
        _show(options)
    return EXIT_OK


def _show(options: Options) -> None:
    """Say where the table is, and write the page beside it."""
    done = book.read(options.results, options.model)
    if done is not None and done.rows:
        print(f"table: {book.table_file(options.results, options.model)}")
        print(f"page: {write_page(done, options.root, options.results)}", flush=True)


def seconds_of(text: str) -> float:
    """Seconds of ``90s``, ``15m`` or ``1h``.

    Raises:
        UsageError: It is no time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is no time limit", advice="Write it like 90s, 15m or 1h")
    return float(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
