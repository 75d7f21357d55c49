"""One process that tries model types: names come in on stdin, a row of JSON goes out on stdout for each.

Whatever a model's own code does to this process, and however long it takes, costs that model type alone: the
process that started this one sets the time limit, and starts another when this one is gone.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from ..errors import TilegymFxError
from ..export import describe
from ..inventory import Inventory, load
from ..model_source import hush_models
from .configs import trial_key
from .judge import FAULTS, judge, without_folders
from .record import Row


def main(roots: list[str]) -> int:
    """Try one model type for each line of stdin."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what models print is no answer
    hush_models()
    inventory = load(*map(Path, roots))
    print("ready", file=answers, flush=True)
    known: dict[str, Row] = {}
    for line in sys.stdin:
        print(_row(line.strip(), inventory, known).line(), file=answers, flush=True)
    return 0


def _row(model_type: str, inventory: Inventory, known: dict[str, Row]) -> Row:
    """The row of a model type; where the very same models have been tried under another name, that one's."""
    started = time.perf_counter()
    try:
        key = trial_key(model_type)
        if key not in known:
            known[key] = judge(model_type, inventory)
        elif known[key].model_type != model_type:
            seconds = round(time.perf_counter() - started, 2)
            return replace(known[key], model_type=model_type, seconds=seconds)
        return known[key]
    except TilegymFxError as error:
        return Row(model_type, problem=without_folders(str(error)))
    except FAULTS as error:
        return Row(model_type, problem=without_folders(f"crash: {describe(error)}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
