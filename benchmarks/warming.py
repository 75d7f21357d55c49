"""Compiling side by side: the same script in worker processes, each of which runs its share of the cases once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence


def warm(script: str, arguments: Sequence[str], part: str, seconds: float) -> None:
    """Fills the compilers' caches on disk from several processes; those that take too long are ended.

    Args:
        script: The script's file.
        arguments: Its arguments.
        part: The option that gives a worker its share, as `index/count`.
        seconds: For all of them.
    """
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, script, *arguments]
    children = [subprocess.Popen([*command, part, f"{index}/{workers}"]) for index in range(workers)]
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            print("a worker was still compiling and has been ended", flush=True)
