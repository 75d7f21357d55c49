"""What the backend did, for the user to ask afterwards."""

from __future__ import annotations

from collections import deque

from .pipeline import Outcome

_recent: deque[Outcome] = deque(maxlen=64)


def add(outcome: Outcome) -> None:
    """Remember the outcome of one compiled graph."""
    _recent.append(outcome)


def last_report() -> Outcome | None:
    """The outcome of the graph that ``torch.compile(backend="tilegym_fx")`` compiled last, or None."""
    return _recent[-1] if _recent else None


def recent_reports() -> tuple[Outcome, ...]:
    """The outcomes of the 64 graphs compiled last, oldest first (a model with graph breaks has several)."""
    return tuple(_recent)


def clear() -> None:
    """Forget what was compiled so far."""
    _recent.clear()
