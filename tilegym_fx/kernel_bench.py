"""Benchmarks of one op: triton.testing's report where triton is, the same in plain Python where it is not.

A result is compared with the reference before anything is timed. Without a CUDA device the kernel's result
is checked in the interpreter, and only the reference is timed: how long the interpreter takes says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilegym_fx import ops
from tilegym_fx.errors import TilegymFxError, VerifyError
from tilegym_fx.kernel_check import difference

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_ROUNDS = 11


@dataclass
class PlainBenchmark:
    """What ``triton.testing.Benchmark`` holds, for where there is no triton."""

    x_names: list[str]
    x_vals: list[Any]
    line_arg: str
    line_vals: list[Any]
    line_names: list[str]
    plot_name: str
    args: dict[str, Any]
    ylabel: str = ""
    x_log: bool = False
    styles: list[tuple[str, str]] = field(default_factory=list)


class PlainReport:
    """What ``triton.testing.perf_report`` makes of a function, for where there is no triton."""

    def __init__(self, function: Callable[..., float], benchmark: PlainBenchmark) -> None:
        self._function, self._benchmark = function, benchmark

    def run(self, *, print_data: bool = False, show_plots: bool = False, save_path: str = "") -> None:
        """Time every line at every x; print the table, or write it to ``<save_path>/<plot_name>.csv``."""
        b = self._benchmark
        rows = [[*b.x_names, *(f"{name} ({b.ylabel})" for name in b.line_names)]]
        for x in b.x_vals:
            point = {**dict.fromkeys(b.x_names, x), **b.args}
            values = [self._function(**point, **{b.line_arg: line}) for line in b.line_vals]
            rows.append([*(str(x) for _ in b.x_names), *(f"{value:.4g}" for value in values)])
        if print_data:
            print(f"{b.plot_name}:")
            for row in rows:
                print("  ".join(cell.rjust(18) for cell in row))
        if save_path:
            text = "".join(",".join(row) + "\n" for row in rows)
            Path(save_path, f"{b.plot_name}.csv").write_text(text, encoding="utf-8")


def benchmark(**what: Any) -> Any:
    """A ``triton.testing.Benchmark``, or its stand-in."""
    if _HAS_TRITON:
        from triton.testing import Benchmark  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return Benchmark(**what)
    return PlainBenchmark(**what)


def perf_report(what: Any) -> Callable[[Callable[..., float]], Any]:
    """``triton.testing.perf_report``, or its stand-in."""
    if _HAS_TRITON:
        from triton.testing import perf_report as report  # type: ignore[import-not-found, import-untyped, unused-ignore]

        made: Callable[[Callable[..., float]], Any] = report(what)
        return made
    return lambda function: PlainReport(function, what)


def lines() -> list[str]:
    """What is timed here: the kernel on a CUDA device, and always torch."""
    return ["cutile", "torch"] if ops.is_backend_available("cutile") else ["torch"]


def check_then_time(inventory: Inventory, name: str, inputs: Mapping[str, Any], line: str) -> float:
    """Seconds of one call of an op, after its result has been compared with the reference.

    Args:
        inventory: That has the Definition.
        name: The op.
        inputs: By name, on the CPU; moved to the CUDA device where there is one.
        line: ``cutile`` or ``torch``.

    Raises:
        VerifyError: The results differ by more than rounding.
    """
    ops.register(inventory)
    op, device = getattr(ops, name), "cuda" if torch.cuda.is_available() else "cpu"
    checked = {"cuda": "cutile", "cpu": "interpret"}[device]
    found = difference(inventory.reference(name), lambda **kw: op(**kw, backend=checked), inputs, device=device)
    if found:
        raise VerifyError(f"{name} on backend {checked}: {found[0]}", advice="Correct the kernel; nothing was timed")
    values = [v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs.values()]
    return seconds_of(lambda: op(*values, backend=line), device)


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Median seconds of a call; on a GPU, of its device time."""
    if device == "cuda" and _HAS_TRITON:
        from triton.testing import do_bench  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return float(do_bench(call, return_mode="median")) / 1e3
    call()
    return statistics.median(_one(call, device) for _ in range(_ROUNDS))


def _one(call: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3


def moved_bytes(inventory: Inventory, name: str, inputs: Mapping[str, Any]) -> int:
    """Bytes of a call's inputs, each read once, and of its outputs."""
    with torch.no_grad():
        result = inventory.reference(name)(**inputs)
    results = result if isinstance(result, tuple) else (result,)
    return sum(v.nbytes for v in (*inputs.values(), *results) if isinstance(v, torch.Tensor))


def main(report: Any, argv: Sequence[str] | None = None) -> None:
    """The command line of a benchmark file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--print-data", action="store_true", help="print the table")
    parser.add_argument("--save-path", default="", metavar="DIR", help="write tables, and with triton plots, there")
    options = parser.parse_args(argv)
    if not ops.is_backend_available("cutile"):
        print("no CUDA device here: the kernel is checked in the interpreter and not timed")
    try:
        report.run(print_data=options.print_data, save_path=options.save_path)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
