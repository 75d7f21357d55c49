"""Is an experiment kept? What it has to be, and which figures are good enough to say so."""

from __future__ import annotations

import math
from typing import Any

from .experiment import Reply
from .figures import TRUSTED
from .ledger import Ledger, Row, shown

#: Figures that differ by less are the same.
_SAME = 1e-6


def against(reply: Reply, run_book: Ledger) -> str:
    """What speaks against keeping it; empty for nothing."""
    if reply.status != "right":
        return reply.problems[0] if reply.problems else "it is not right"
    figures, fastest = reply.figures, run_book.fastest_kept
    if why := _no_figures(figures):
        return why
    if figures.get("note") and not fastest.note:
        return f"its throughput cannot be compared: {figures['note']}"
    noises = figures["noise"], fastest.noise or 0.0
    noise = max(noises)
    return (
        next(filter(None, map(untrusted, noises)), "")
        or _slower(figures["throughput"], fastest, noise)
        or _covers_no_more(figures["coverage"], run_book.last_kept)
    )


def against_baseline(figures: dict[str, Any]) -> str:
    """Why nothing can be compared with a baseline; empty if it can."""
    why = _no_figures(figures) or untrusted(figures["noise"])
    return f"{why}; {figures['note']}" if why and figures.get("note") else why


def untrusted(noise: float) -> str:
    """Why figures are too noisy to be compared; empty if they are not."""
    if 0 <= noise <= TRUSTED:
        return ""
    return f"noise: throughput is known to ± {noise:.1%} only, and beyond ± {TRUSTED:.0%} nothing is kept"


def _no_figures(figures: dict[str, Any]) -> str:
    """Why a throughput is none, as where a clock has failed; empty if it is one."""
    throughput = figures["throughput"]
    return "" if math.isfinite(throughput) and throughput >= 0 else f"throughput cannot be {throughput}"


def _slower(throughput: float, fastest: Row, noise: float) -> str:
    if throughput >= (fastest.throughput or 0.0) * (1 - noise - _SAME):
        return ""
    return f"throughput would drop from {shown(fastest)} to {throughput:,.1f}"


def _covers_no_more(coverage: float, before: Row) -> str:
    return "" if coverage > (before.coverage or 0.0) + _SAME else f"coverage stays at {coverage:.2%}"
