"""Whoever times something on a GPU has it alone, however many benches were started side by side.

Preparing (weights, compilers, first calls) is shared: it takes most of the time, and nearly all of that on the CPU.
Timing waits until nobody prepares, and meanwhile nobody begins to.
"""

from __future__ import annotations

import fcntl
import tempfile
from io import TextIOWrapper
from pathlib import Path


class Turns:
    """A worker's place in the queue for a GPU; locks end with the process that holds them.

    Args:
        gpu: Its name among the benches of this machine, or None where there is nothing to share.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gate, self._room = (_lock_file(f"{gpu}.{part}") if gpu else None for part in ("gate", "room"))

    def prepare(self) -> None:
        """Wait until nobody times; others may prepare too."""
        self._enter(fcntl.LOCK_SH)

    def measure(self) -> None:
        """Wait until nobody else uses the GPU."""
        self._enter(fcntl.LOCK_EX)

    def leave(self) -> None:
        """Let others have it."""
        if self._room is not None:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def _enter(self, kind: int) -> None:
        if self._gate is None or self._room is None:
            return
        self.leave()
        fcntl.flock(self._gate, fcntl.LOCK_EX)  # one that waits to measure keeps others from beginning to prepare
        try:
            fcntl.flock(self._room, kind)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)


def _lock_file(name: str) -> TextIOWrapper:
    return (Path(tempfile.gettempdir()) / f"tilegym_fx_bench_{name}").open("a", encoding="utf-8")
