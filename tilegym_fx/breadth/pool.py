"""Hands model types to worker processes, with a time limit for each; a hang or a crash costs one type alone."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from .record import Row

#: What Python runs as a worker.
WORKER = ("-m", "tilegym_fx.breadth.worker")
#: What starting a worker may take: imports, and tracing every pattern.
_START_SECONDS = 300.0
#: Model types that one process tries before it is replaced: what models leave behind does not pile up.
_TYPES_A_WORKER = 40


class Worker:
    """One worker process, started on first use and again after it is gone."""

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        self._roots = [str(root) for root in roots]
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last_words: deque[str | None] = deque(maxlen=20)
        self._done = 0

    def judge(self, model_type: str, limit: float) -> Row:
        """The row of a model type, or one that says that the worker died or took too long."""
        if self._process is None or self._done >= _TYPES_A_WORKER:
            self.stop()
            self._start()
            if self._answer(_START_SECONDS) is None:
                return self._lost(model_type, "the worker did not start")
        self._done += 1
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(f"{model_type}\n")
        process.stdin.flush()
        try:
            answer = self._answer(limit)
        except queue.Empty:
            return self._lost(model_type, f"took more than {limit:.0f} s", seconds=limit)
        return Row.of_line(answer) if answer is not None else self._lost(model_type, "the process died")

    def _start(self) -> None:
        command = [sys.executable, *WORKER, *self._roots]
        # places that an earlier kernelize kept of the very same tiny model have no graph to count in
        set_here = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TILEGYM_FX_PLANS": "0"}
        environment = {**os.environ, **set_here}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._lines, self._done = queue.Queue(), 0
        for stream, take in ((self._process.stdout, self._lines.put), (self._process.stderr, self._last_words.append)):
            threading.Thread(target=_follow, args=(stream, take), daemon=True).start()

    def _answer(self, limit: float) -> str | None:
        return self._lines.get(timeout=limit)

    def _lost(self, model_type: str, why: str, seconds: float = 0.0) -> Row:
        self.stop()
        said = next((line for line in reversed(self._last_words) if line and line.strip()), "") or ""
        return Row(model_type, seconds=seconds, problem=f"{why}{f': {said.strip()[:200]}' if said else ''}")

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _follow(stream: IO[str], take: Callable[[str | None], None]) -> None:
    for line in stream:
        take(line)
    take(None)


def judged(
    model_types: Sequence[str], *, jobs: int = 2, limit: float = 240.0, roots: Sequence[Path] = ()
) -> Iterator[Row]:
    """The row of each model type, in the order in which they are done.

    Args:
        model_types: What to try.
        jobs: Worker processes at once.
        limit: Seconds for each model type.
        roots: Further inventory roots.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for model_type in model_types:
        waiting.put(model_type)
    rows: queue.Queue[Row] = queue.Queue()
    workers = [Worker(roots) for _ in range(max(1, min(jobs, len(model_types))))]
    for worker in workers:
        threading.Thread(target=_work, args=(worker, waiting, rows, limit), daemon=True).start()
    try:
        for _ in model_types:
            yield rows.get()
    finally:
        for worker in workers:
            worker.stop()


def _work(worker: Worker, waiting: queue.SimpleQueue[str], rows: queue.Queue[Row], limit: float) -> None:
    while True:
        try:
            model_type = waiting.get_nowait()
        except queue.Empty:
            return worker.stop()
        rows.put(worker.judge(model_type, limit))
