"""Benchmarks whose cases are measured one by one: their common options, and the run that ends when its time is up."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from timing import copy_rate
from warming import warm

Case = TypeVar("Case")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that each of them has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seconds", type=float, default=300, help="start no further case after this time")
    options.add_argument("--json", type=Path, help="write all numbers to this file")
    options.add_argument("--dry-run", action="store_true", help="needs no GPU: small shapes in the interpreter")
    options.add_argument("--part", help=argparse.SUPPRESS)
    return options


def decode_options(description: str, models: Sequence[str], arguments: Sequence[str]) -> argparse.Namespace:
    """The options of those that measure a step of decode after contexts of models.

    Args:
        description: What it is.
        models: Their names.
        arguments: Of the command.
    """
    options = parser(description)
    options.add_argument("--only", nargs="+", choices=models, default=list(models), metavar="MODEL")
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    options.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192])
    return options.parse_args(arguments)


def run(
    script: str, arguments: Sequence[str], options: argparse.Namespace, wanted: Sequence[Case],
    measure: Callable[[Case], dict[str, Any]], run_once: Callable[[Sequence[Case], str], None],
    dry_run: Callable[[Case], None], warm_limit: float, *, shown: Sequence[Case] | None = None,
) -> int:  # fmt: skip
    """What the options ask for: a dry run, a share of the compiling, or everything measured.

    Args:
        script: The benchmark's file.
        arguments: Its arguments.
        options: What they say.
        wanted: The cases.
        measure: Measures one, and prints its lines.
        run_once: Compiles a share of all.
        dry_run: Shows one without a GPU.
        warm_limit: Seconds for compiling.
        shown: The cases of a dry run, if they are not all.

    Returns:
        The exit status.
    """
    if options.dry_run:
        for case in wanted if shown is None else shown:
            dry_run(case)
    elif options.part:
        run_once(wanted, options.part)
    else:
        measure_all(script, arguments, options, wanted, measure, warm_limit)
    return 0


def measure_all(
    script: str, arguments: Sequence[str], options: argparse.Namespace, wanted: Sequence[Case],
    measure: Callable[[Case], dict[str, Any]], warm_limit: float,
) -> None:  # fmt: skip
    """Compile everything side by side, then measure case after case; the file has what is known so far.

    Args:
        script: The benchmark's file, which takes `--part` and then only compiles its share.
        arguments: Its arguments.
        options: What they say.
        wanted: The cases.
        measure: Measures one, and prints its lines.
        warm_limit: Seconds for compiling.
    """
    start = time.monotonic()
    warm(script, arguments, "--part", warm_limit)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy_rate() / 1e9:.0f} GB/s, "
          f"{time.monotonic() - start:.0f} s compiling", flush=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for case in wanted:
        if time.monotonic() - start > options.seconds:
            print(f"time is up: {len(wanted) - len(rows)} cases left out")
            break
        rows.append(measure(case))
        if options.json:
            options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
