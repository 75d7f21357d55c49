"""Results as a person reads them, and as the two lines that scripts look for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .cases import VARIANTS
from .results import Result, Samples, speedup, subject

_COLUMNS = ("phase", "variant", "GPU ms", "spread", "wall ms", "spread", "tokens/s", "x GPU", "x wall",
            "coverage", "ready s", "peak GB")  # fmt: skip
_TEXT_COLUMNS = 2
_KERNELS_SHOWN = 12
_NAME_WIDTH = 90
#: A variant that replays CUDA graphs keeps the GPU busy for at least this share of a step.
_BUSY = 0.8


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row for each timed result; ``x`` is against the fastest baseline of the same phase."""
    return [_row(result, results) for result in results if result.error is None]


def _row(result: Result, results: Sequence[Result]) -> tuple[str, ...]:
    rate = result.parsed.tokens_per_call / result.wall.median if result.wall else None
    return (
        result.case, result.variant, *_milliseconds(result.gpu), *_milliseconds(result.wall),
        _text(rate, "{:.1f}"),
        _text(speedup(result, results, "gpu"), "{:.2f}"), _text(speedup(result, results), "{:.2f}"),
        _text(result.coverage, "{:.1%}"), _text(sum(result.prepare.values()), "{:.0f}"),
        _text(result.peak_bytes / 1e9 or None, "{:.1f}"),
    )  # fmt: skip


def _milliseconds(samples: Samples | None) -> tuple[str, str]:
    if samples is None:
        return "-", "-"
    return f"{1e3 * samples.median:.3f}", f"{samples.spread:.1%}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def kernel_rows(result: Result) -> list[tuple[str, ...]]:
    """The longest kernels of a result: milliseconds a call, share, launches a call, whose, name."""
    total = sum(kernel.seconds for kernel in result.kernels)
    return [
        (f"{1e3 * k.seconds:.3f}", f"{k.seconds / total:.1%}", f"{k.count:g}",
         "ours" if k.is_ours else "", k.name[:_NAME_WIDTH])
        for k in result.kernels[:_KERNELS_SHOWN]
    ]  # fmt: skip


def plain_table(columns: Sequence[str], rows: Sequence[tuple[str, ...]], text: Sequence[int]) -> list[str]:
    """A table in monospaced text.

    Args:
        columns: Their titles.
        rows: Their cells.
        text: Which columns are set to the left; the others hold numbers.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        set_ = [c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(set_).rstrip()

    return [line(columns), line(["-" * width for width in widths]), *map(line, rows)]


def header_lines(header: dict[str, Any]) -> Iterator[str]:
    """What was measured, on what and with what."""
    about = header.get("about", {})
    size = f", {about['parameters'] / 1e6:,.1f} M parameters" if "parameters" in about else ""
    layers = f", {header['layers']} layers" if header.get("layers") else ""
    kind = f"{about.get('class', '')}{size}{layers}, attention {about.get('attention', '?')}"
    yield f"{header.get('model', '?')}  {kind}, {header.get('dtype', '?')}"
    if header.get("dry_run"):
        yield "dry run: a tiny model on the CPU, rewritten but not compiled; its times mean nothing"
    yield ", ".join(f"{name} {value}" for name, value in header.get("machine", {}).items())
    yield ", ".join(f"{name} {value}" for name, value in header.get("versions", {}).items())
    if about.get("copy_rate") and about.get("read_bytes"):
        floor = about["read_bytes"] / about["copy_rate"]
        yield f"copy rate {about['copy_rate'] / 1e9:.0f} GB/s; to read the weights takes {1e3 * floor:.3f} ms"


def remarks(results: Sequence[Result]) -> Iterator[str]:
    """What was not timed and why, which kernels were not used, and other things to know."""
    yield from _errors(results)
    for result in results:
        where = f"{result.case} {result.variant}"
        for op, count in result.fallbacks.items():
            yield f"{where}: {count} calls ran a reference: {op}"
        if result.note:
            yield f"{where}: {result.note}"
        yield from _idleness(result)


def _idleness(result: Result) -> Iterator[str]:
    """Whether a variant that should replay CUDA graphs seems not to."""
    if VARIANTS[result.variant].mode != "graphs" or result.gpu is None or not result.kernels:
        return
    busy = sum(kernel.seconds for kernel in result.kernels) / result.gpu.median
    if busy < _BUSY:
        where = f"{result.case} {result.variant}"
        yield f"{where}: the GPU is busy for {busy:.0%} only: was the graph captured at all?"


def _errors(results: Sequence[Result]) -> Iterator[str]:
    """A line for each variant and reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.error:
            cases.setdefault((result.variant, result.error), []).append(result.case)
    for (variant, error), listed in cases.items():
        yield f"{variant} is not timed in {', '.join(listed)}: {error}"


def summary_lines(results: Sequence[Result]) -> list[str]:
    """Throughput and coverage of the fastest of our variants, worded as scripts expect them."""
    shown = subject(results)
    if shown is None or shown.wall is None:
        return []
    mean, deviation = shown.wall.rate(shown.parsed.tokens_per_call)
    coverage = "   n/a (no GPU)" if shown.coverage is None else f"{100 * shown.coverage:8.2f}%"
    return [
        f"{shown.case} with {shown.variant}:",
        f"Average throughput: {mean:.2f} ± {deviation:.2f} tokens/sec",
        f">>> cuTile Kernel Coverage (GPU Time): {coverage} <<<",
    ]


def report_lines(header: dict[str, Any], results: Sequence[Result]) -> list[str]:
    """The whole report as plain text."""
    lines = [*header_lines(header), ""]
    rows = table_rows(results)
    if rows:
        lines += plain_table(_COLUMNS, rows, range(_TEXT_COLUMNS))
    lines += ["", *_kernel_lines(results), *remarks(results)]
    return [*lines, *summary_lines(results)]


def _kernel_lines(results: Sequence[Result]) -> list[str]:
    shown = subject(results)
    if shown is None or not shown.kernels:
        return []
    columns = ("ms", "share", "launches", "whose", "kernel")
    return [f"{shown.case} with {shown.variant}", *plain_table(columns, kernel_rows(shown), (3, 4)), ""]


def print_report(header: dict[str, Any], results: Sequence[Result], show: Callable[[str], None] = print) -> None:
    """The report with a drawn table where rich is installed, else as plain text."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for line in report_lines(header, results):
            show(line)
        return
    for line in header_lines(header):
        show(line)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i < _TEXT_COLUMNS else "right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with console.capture() as drawn:
        console.print(table)
    show(drawn.get())
    for line in (*_kernel_lines(results), *remarks(results), *summary_lines(results)):
        show(line)
