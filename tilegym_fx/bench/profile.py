"""Time by kernel from a profiler's trace, and which of the kernels are ours."""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tilegym_fx import settings
from tilegym_fx.inventory import shipped_root

from .results import KernelTime

#: What a trace calls the things that keep a GPU busy; ranges around them have other categories.
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_KERNELS_KEPT = 40


@cache
def kernel_functions(*folders: Path) -> frozenset[str]:
    """Names of the functions decorated with ``@ct.kernel`` in the Python files of these folders.

    Args:
        folders: The ``kernels/`` of all inventory roots where none is given.
    """
    names: set[str] = set()
    for folder in folders or [root / "kernels" for root in (shipped_root(), *settings.inventory_roots())]:
        for file in sorted(folder.rglob("*.py")):
            names |= kernels_in(file.read_text(encoding="utf-8"))
    return frozenset(names)


def kernels_in(text: str) -> frozenset[str]:
    """Names of the functions decorated with ``@ct.kernel`` in a file's text."""
    return frozenset(n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and _is_kernel(n))


def _is_kernel(function: ast.FunctionDef) -> bool:
    called = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(ast.unparse(decorator).split(".")[-1] == "kernel" for decorator in called)


def our_kernels(names: Iterable[str]) -> re.Pattern[str]:
    """Matches what a profiler calls their kernels: cuTile appends ``_K`` and the parameters' types."""
    return re.compile(rf"(?:{'|'.join(sorted(map(re.escape, names), reverse=True))})(?:_K.*)?")


def kernel_times(
    trace: Mapping[str, Any], ours: re.Pattern[str], calls: int = 1
) -> tuple[KernelTime, ...]:  # fmt: skip
    """GPU time by kernel of one call, longest first; what is beyond the longest 40 is added up.

    A kernel that starts before its predecessor on the stream has ended waits for it: that time counts once, as the
    predecessor's.

    Args:
        trace: A Chrome trace, as ``torch.profiler`` exports it, of ``calls`` calls.
        ours: Matches the whole names of our kernels.
        calls: What to divide by.
    """
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    ends: dict[Any, float] = defaultdict(lambda: -math.inf)
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X" and e.get("cat") in _ON_GPU]
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        stream = (event.get("pid"), event.get("tid"))
        start = event.get("ts", 0.0)
        end = start + event["dur"]
        seconds[event["name"]] += max(0.0, end - max(start, ends[stream])) / 1e6
        counts[event["name"]] += 1
        ends[stream] = max(ends[stream], end)
    times = [
        KernelTime(name, seconds[name] / calls, counts[name] / calls, ours.fullmatch(name) is not None)
        for name in sorted(seconds, key=lambda name: -seconds[name])
    ]
    return (*times[:_KERNELS_KEPT], *_added_up(times[_KERNELS_KEPT:]))


def _added_up(times: list[KernelTime]) -> Iterable[KernelTime]:
    for is_ours in (True, False):
        group = [time for time in times if time.is_ours is is_ours]
        if group:
            name = f"{len(group)} more of {'ours' if is_ours else 'others'}"
            yield KernelTime(name, sum(t.seconds for t in group), sum(t.count for t in group), is_ours)
