"""Running an experiment in a child: a hard time limit, and nothing of it left when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .experiment import Reply, Request

End = Literal["answered", "timeout", "crash"]


@dataclass(frozen=True)
class Answer:
    """How a child ended.

    Attributes:
        end: ``answered``, or why there is no reply.
        reply: What it found.
        why: In words, where it did not answer.
    """

    end: End
    reply: Reply | None = None
    why: str = ""


def ask(request: Request, limit: float, log: Path) -> Answer:
    """Have a request carried out.

    Args:
        request: What to do.
        limit: Seconds after which the child, and all that it started, is killed.
        log: Where its stderr goes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "tilegym_fx.autokernelize.experiment"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        try:
            text, _ = child.communicate(json.dumps(asdict(request)), timeout=limit)
        except subprocess.TimeoutExpired:
            return Answer("timeout", why=f"took longer than {limit:.0f} s{_last_step(log)}")
        finally:
            _end(child)
    if child.returncode != 0 or not text:
        return Answer("crash", why=f"{_words(child.returncode)}{_last_step(log)}")
    fields: dict[str, Any] = json.loads(text)
    reply = Reply(**{**fields, "uncovered": [tuple(pair) for pair in fields.get("uncovered", [])]})
    if reply.status == "error":
        return Answer("crash", reply, why="; ".join(reply.problems))
    return Answer("answered", reply)


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the child with all that it has started, hooks and compilers included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _words(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _last_step(log: Path) -> str:
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    steps = [line.removeprefix("autokernelize: ") for line in said if line.startswith("autokernelize: ")]
    return f" while {steps[-1]}" if steps else ""
