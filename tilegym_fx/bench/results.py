"""The numbers of a run, and the arithmetic on them. No torch: all of it can be read back from a file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from .cases import VARIANTS, Case, parse_cases

#: Into how many groups of successive calls the uncertainty of a median divides them.
_GROUPS = 8


@dataclass(frozen=True)
class Samples:
    """Seconds of one call, measured again and again."""

    seconds: tuple[float, ...]

    @property
    def are_times(self) -> bool:
        """Whether every one of them is a time that a call can take."""
        return all(0 < seconds < math.inf for seconds in self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the slow and the fast tenth, as a share of the median."""
        ordered = sorted(self.seconds)
        tenth = len(ordered) // 10
        return (ordered[-1 - tenth] - ordered[tenth]) / self.median

    @property
    def uncertainty(self) -> float:
        """How far the median may be off, as a share of it; infinite where the calls are too few to tell, or no times.

        Half the distance between the second lowest and the second highest of the medians of eight groups of successive
        calls. Whatever the distribution, the true median lies between these two in 93 of 100 cases; successive calls,
        which have a disturbance or a drift in common, stay together and are not taken for independent ones.
        """
        count = len(self.seconds)
        if count < _GROUPS or not self.are_times:
            return math.inf
        cuts = [i * count // _GROUPS for i in range(_GROUPS + 1)]
        medians = sorted(statistics.median(self.seconds[a:b]) for a, b in pairwise(cuts))
        return (medians[-2] - medians[1]) / 2 / self.median

    def rate(self, tokens: int) -> tuple[float, float]:
        """Mean and standard deviation of tokens a second, over the calls."""
        rates = [tokens / seconds for seconds in self.seconds]
        return statistics.mean(rates), statistics.stdev(rates) if len(rates) > 1 else 0.0


@dataclass(frozen=True)
class KernelTime:
    """GPU time of one kernel, or kind of copy, in one profiled call."""

    name: str
    seconds: float
    count: float
    is_ours: bool


@dataclass(frozen=True)
class Result:
    """One variant in one case.

    Attributes:
        case: Which call, as :class:`Case` writes it.
        variant: Name of the variant.
        gpu: GPU time of a call. In decode, of one step inside a CUDA graph; of a prompt too where the job wants that.
        wall: Time on the clock, with everything that the host does.
        kernels: Longest first; empty where there is no GPU.
        verdict: What was compared with the original, and how near it is.
        prepare: Seconds by step: ``build``, ``patch``, ``first call``.
        fallbacks: Op and reason -> calls that ran a reference instead of a kernel.
        peak_bytes: Most memory in use while it was timed.
        note: What a reader of the times has to know.
        error: Why there are no times.
    """

    case: str
    variant: str
    gpu: Samples | None = None
    wall: Samples | None = None
    kernels: tuple[KernelTime, ...] = ()
    verdict: str = ""
    prepare: dict[str, float] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    note: str = ""
    error: str | None = None

    @property
    def parsed(self) -> Case:
        return parse_cases([self.case])[0]

    @property
    def coverage(self) -> float | None:
        """Share of the GPU's time, copies included, that our kernels take; None where nothing ran on one."""
        total = sum(kernel.seconds for kernel in self.kernels)
        return sum(k.seconds for k in self.kernels if k.is_ours) / total if total else None


def as_json(result: Result) -> dict[str, Any]:
    """The result for a file of JSON lines, with the derived figures that readers want."""
    derived: dict[str, Any] = {"coverage": result.coverage}
    for name, samples in (("gpu", result.gpu), ("wall", result.wall)):
        if samples is not None:
            derived[f"{name}_ms"] = round(1e3 * samples.median, 5)
            derived[f"{name}_spread"] = round(samples.spread, 5)
    if result.wall is not None:
        derived["tokens_per_second"] = round(result.parsed.tokens_per_call / result.wall.median, 3)
    return {"kind": "result", **derived, **asdict(result)}


def from_json(fields: dict[str, Any]) -> Result:
    """The inverse of :func:`as_json`."""
    own = {name: fields[name] for name in Result.__dataclass_fields__ if name in fields}
    for name in ("gpu", "wall"):
        if own.get(name):
            own[name] = Samples(tuple(own[name]["seconds"]))
    own["kernels"] = tuple(KernelTime(**kernel) for kernel in own.get("kernels", ()))
    return Result(**own)


def latest(results: Iterable[Result]) -> list[Result]:
    """One result for each case and variant, the later one; ordered by case, then by variant."""
    kept = {(result.case, result.variant): result for result in results}
    cases = list(dict.fromkeys(case for case, _ in kept))
    order = list(VARIANTS)
    return sorted(kept.values(), key=lambda r: (cases.index(r.case), order.index(r.variant)))


def best(results: Iterable[Result], *, ours: bool = False, measure: str = "wall") -> Result | None:
    """The fastest timed result, among the baselines or among our variants."""
    wanted = [
        result for result in results
        if getattr(result, measure) is not None
        and (VARIANTS[result.variant].is_ours if ours else VARIANTS[result.variant].is_baseline)
    ]  # fmt: skip
    return min(wanted, key=lambda result: getattr(result, measure).median, default=None)


def speedup(result: Result, results: Sequence[Result], measure: str = "wall") -> float | None:
    """How many times faster than the best baseline of its case; None where either has no time."""
    own = getattr(result, measure)
    baseline = best((r for r in results if r.case == result.case), measure=measure)
    if own is None or baseline is None:
        return None
    return float(getattr(baseline, measure).median / own.median)


def subject(results: Sequence[Result]) -> Result | None:
    """What the summary lines speak of: a generation, else a step, else a prompt; ours where there is one."""
    for kind in ("generate", "decode", "prefill"):
        of_kind = [result for result in results if result.parsed.kind == kind]
        first = [result for result in of_kind if result.case == of_kind[0].case]
        found = best(first, ours=True) or best(first)
        if found is not None:
            return found
    return None
