"""Workers one after another or a few at once, each in a process of its own with a time limit.

Building and compiling is done side by side; the GPU is timed by one worker at a time, while the others wait.
What a worker has answered is kept whatever becomes of it afterwards.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_fx import settings
from tilegym_fx.errors import TilegymFxError

from .job import Job
from .results import Result, as_json
from .worker import Worker

#: How much of what a worker printed is shown when it crashes, or does not answer.
_LINES_SHOWN = 25
#: What a worker takes to write down where it is.
_DUMP_SECONDS = 1.0

Message = dict[str, Any]
Sink = Callable[[Message], None]


@dataclass(frozen=True)
class Limits:
    """How long a step of a worker may take, and how many workers prepare at once."""

    seconds: float = 300.0
    at_once: int = 1


def _inventory(job: Job) -> dict[str, str]:
    """How a worker is told of the inventory roots of its job."""
    roots = [*map(str, settings.inventory_roots()), *job.inventory]
    return {"TILEGYM_FX_INVENTORY": os.pathsep.join(dict.fromkeys(roots))} if job.inventory else {}


class Child:
    """A worker in a process of its own.

    Args:
        job: What it does.
        seconds: How long it may take to answer.
    """

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self._seconds = job, seconds
        self._log = Path(job.folder) / f"{job.variant}.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tilegym_fx.bench.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env={**os.environ, **_inventory(job), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.say(json.dumps(job.as_json()))

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def say(self, line: str) -> None:
        """Write a line to it, if it still listens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._answers.put("")

    def answer(self) -> Message:
        """Its next message, or ``refused`` with the reason why there is none."""
        try:
            line = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            self._process.send_signal(signal.SIGUSR1)  # it writes into its log what it is doing
            time.sleep(_DUMP_SECONDS)
            self._show_log()
            return {"kind": "refused", "why": f"no answer within {self._seconds:g} s"}
        if line:
            message: Message = json.loads(line)
            return message
        self._process.wait()
        last = self._show_log()
        return {"kind": "refused", "why": f"ended with status {self._process.returncode}: {last}"}

    def _show_log(self) -> str:
        """The end of what it printed goes to stderr; returns the last line."""
        log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
        print("\n".join(log[-_LINES_SHOWN:]), file=sys.stderr)
        return log[-1]

    def end(self) -> None:
        """Stop it with all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(jobs: Sequence[Job], sink: Sink, limits: Limits) -> None:
    """Do all jobs; the first by itself, because the others are judged by what it leaves.

    Args:
        jobs: The first is the original model.
        sink: Takes messages of the kinds ``about`` and ``result``, as they come.
        limits: For each worker.
    """
    if not _run_together(jobs[:1], sink, limits):
        return _give_up(jobs[1:], sink)
    for i in range(1, len(jobs), limits.at_once):
        _run_together(jobs[i : i + limits.at_once], sink, limits)


def _run_together(jobs: Sequence[Job], sink: Sink, limits: Limits) -> bool:
    """Whether any of them could build its model."""
    children = [Child(job, limits.seconds) for job in jobs]
    try:
        return _converse(children, sink)
    finally:
        for child in children:
            child.end()


def _give_up(jobs: Sequence[Job], sink: Sink) -> None:
    for job in jobs:
        for result in _failures(job, job.cases, "there is no original to compare it with"):
            sink(result)


def _converse(children: Sequence[Child], sink: Sink) -> bool:
    built = live = [child for child in children if _settled(child, sink, ("about",), child.job.cases)]
    for i in range(len(children[0].job.cases)):
        rest = children[0].job.cases[i:]
        for child in live if i else ():
            child.say("next")
        prepared = [(child, _settled(child, sink, ("ready", "result", "judged"), rest)) for child in live]
        live = [child for child, kind in prepared if kind]
        for child, kind in prepared:
            if kind == "ready":
                child.say("go")
                if not _settled(child, sink, ("result",), rest):
                    live = [other for other in live if other is not child]
    return bool(built)


def _settled(child: Child, sink: Sink, kinds: Sequence[str], cases: Sequence[str]) -> str | None:
    """Kind of the child's next message; where it has none, None and a failed result for each of the cases."""
    message = child.answer()
    if message["kind"] in kinds:
        if message["kind"] in ("about", "result"):
            sink({**message, "variant": child.job.variant})
        return str(message["kind"])
    child.end()
    for result in _failures(child.job, cases, message.get("why", "answered out of turn")):
        sink(result)
    return None


def _failures(job: Job, cases: Sequence[str], why: str) -> Iterator[Message]:
    for case in cases if job.timed else ():
        yield as_json(Result(case, job.variant, error=why))


def run_here(jobs: Sequence[Job], sink: Sink) -> None:
    """Do all jobs in this process: for small models, and to debug."""
    for job in jobs:

        def send(message: Message, variant: str = job.variant) -> None:
            if message["kind"] in ("about", "result"):
                sink({**message, "variant": variant})

        try:
            Worker(job, send, lambda: None).run()
        except TilegymFxError as error:
            for result in _failures(job, job.cases, str(error)):
                sink(result)
