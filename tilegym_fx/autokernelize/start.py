"""The start of a run: all that was asked for is looked at before anything is written or said."""

from __future__ import annotations

import json
from pathlib import Path

from tilegym_fx.errors import UsageError

from . import ledger as book
from .experiment import TURN_FILE
from .ledger import Ledger
from .options import Options
from .preflight import (
    environment,
    require_clean,
    require_inventories,
    require_model,
    require_sense,
    require_writable,
)
from .repository import Repository
from .subject import is_file


def start(options: Options) -> tuple[Repository, Ledger]:
    """The repository of a run, clean, and its ledger, new or of an earlier run.

    Raises:
        TilegymFxError: Something that was asked for does not exist or makes no sense, an earlier run is of something
            else, there is no GPU to measure on, or the tree is not clean.
    """
    require_sense(options)
    found = environment(
        dry_run=options.dry_run, device=options.device, layers=options.layers, dtype=options.dtype
    )  # fmt: skip
    require_writable(book.state_file(options.results, options.model).parent)
    known = _earlier(options, found)
    require_model(options.model, options.layers)
    require_inventories(options.root, options.libraries, alone=options.alone)
    repository = Repository(options.root, init=options.init)
    if known is not None and known.running is not None:
        _recover(repository, known, options.folder(known.running))
    require_clean(repository, options.results)
    repository.start()
    return repository, known or Ledger(options.model, found)


def _earlier(options: Options, found: dict[str, str]) -> Ledger | None:
    """The ledger of an earlier run of the same; None where there was none, or one that came to no row."""
    known = book.read(options.results, options.model)
    if known is None or not known.rows:
        return None
    if known.model != options.model and not is_file(options.model):  # one file has many paths
        file = book.state_file(options.results, options.model)
        raise UsageError(f"{file} is of another model, {known.model}", advice="Take another --results")
    names = [*found, *(name for name in known.environment if name not in found)]
    other = next((name for name in names if known.environment.get(name) != found.get(name)), None)
    if other is not None:
        raise UsageError(
            f"an earlier run of {options.model} has other {other}: {known.environment.get(other, 'not given')}",
            advice="Remove its folder, or take another --results",
        )
    return known


def _recover(repository: Repository, known: Ledger, folder: Path) -> None:
    """Undo what an experiment that was killed with its parent has left."""
    if not set(repository.changed_tracked()) <= _changes_of(folder):
        return  # somebody else's
    if repository.head == known.head or repository.is_one_ahead(known.head):
        repository.back_to(known.head)
        known.running = None


def _changes_of(folder: Path) -> set[str]:
    """Files that an experiment changes; all others that it writes are new."""
    file = folder / TURN_FILE
    return set(json.loads(file.read_text(encoding="utf-8"))["changes"]) if file.is_file() else set()
