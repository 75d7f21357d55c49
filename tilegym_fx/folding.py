"""Tables that stay readable in a narrow terminal: long names are folded at their seams, and no line ends in blanks."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 160
_SEAM = re.compile(r"[^._/]*[._/]+|[^._/]+")


def console() -> Console:
    """The terminal's width on a terminal, else that of COLUMNS, else wide enough for a source line in each row."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=shutil.get_terminal_size((_FILE_WIDTH, 24)).columns)


class Folding:
    """Text that breaks between words, and inside a word too long for a line after a dot, slash or underscore."""

    def __init__(self, text: str) -> None:
        self._words = text.split()

    def __rich_measure__(self, out: Console, options: ConsoleOptions) -> Measurement:
        least = max((len(piece) for word in self._words for piece in _SEAM.findall(word)), default=0)
        most = len(" ".join(self._words))
        return Measurement(min(least, most), most).with_maximum(options.max_width)

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text("\n".join(folded(self._words, options.max_width)), overflow="fold")


def folded(words: list[str], width: int) -> list[str]:
    """The lines that words take."""
    lines = [""]
    for word in words:
        pieces = [word] if len(word) <= width else _SEAM.findall(word)
        gap = " " if lines[-1] else ""
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(gap) + len(piece) > width:
                lines.append(piece)
            else:
                lines[-1] += gap + piece
            gap = ""
    return lines


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; counts and times stand on the right."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        numeric = column in ("sites", "time", "count")
        made.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    return made


def show(made: RenderableType, out: Console) -> None:
    """Print a table or text, into a file or pipe without the blanks that fill its lines."""
    if out.is_terminal:
        out.print(made)
        return
    with out.capture() as captured:
        out.print(made)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    out.print(text, markup=False, highlight=False, soft_wrap=True)
