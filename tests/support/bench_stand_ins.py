"""What only a GPU has, for benchmarks that are tested without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def without_gpu(bench: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The case, and the benchmark as it goes on a GPU: two sets of arguments on the CPU, whose number is their time."""
    monkeypatch.setattr(bench, "argument_sets", lambda make: [case.make("cpu"), case.make("cpu")])
    monkeypatch.setattr(bench, "median_time", lambda calls: SimpleNamespace(microseconds=float(len(calls))))
    monkeypatch.setattr(bench, "replays_that_differ", lambda run, arguments: 0)
    return case
