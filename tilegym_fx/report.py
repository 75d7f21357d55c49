"""What ``kernelize`` did to a model, for a person to print and a script to check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .emit import EmitResult, Written
from .errors import MatchError
from .pipeline import Outcome
from .results import Rejection
from .verify import Check


@dataclass(frozen=True)
class Report:
    """What was applied where, what was not and why, and the numbers that judged it.

    Attributes:
        model: Class of the model.
        text: The emitted module that runs.
        written: Every place that runs a kernel, once for each capture that it was found in.
        rejections: Every place that nearly fits, or fits and was not taken.
        coverage: Capture (``prefill``, ``decode``...) -> estimated share of device time in our kernels, 0 to 1.
        problems: Capture -> why it could not be made.
        checks: Outputs compared with the original's; empty without ``verify`` or on ``meta``.
        seconds: Wall time of capturing, matching and writing.
    """

    model: str
    text: str
    written: tuple[Written, ...]
    rejections: tuple[Rejection, ...]
    coverage: Mapping[str, float]
    problems: Mapping[str, str]
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, made: EmitResult, outcomes: Mapping[str, Outcome], problems: Mapping[str, str],
           seconds: float) -> Report:  # fmt: skip
        """The report of a planned and written model."""
        found = tuple(r for outcome in outcomes.values() for r in outcome.rejections)
        coverage = {name: _written_coverage(outcome, made) for name, outcome in outcomes.items()}
        return cls(type(model).__name__, made.text, made.written, (*made.refused, *found), coverage, dict(problems),
                   seconds=seconds)  # fmt: skip

    def with_checks(self, checks: Sequence[Check]) -> Report:
        return replace(self, checks=tuple(checks))

    def counts(self, capture: str | None = None) -> dict[str, int]:
        """Definition -> places; ``capture`` has no effect on places that several captures share."""
        places = {(w.match.definition, w.module_path, w.method, w.line, w.guards) for w in self.written}
        return dict(Counter(place[0] for place in places))

    def misses(self) -> list[str]:
        """The reasons, one line each, nearest first."""
        ranked = sorted(self.rejections, key=lambda r: -r.depth)
        lines = [f"{r.definition} at {r.site}: {r.reason}" for r in ranked if not r.reason.startswith("overlaps ")]
        return list(dict.fromkeys(lines))

    def require(self, *, coverage: float) -> Report:
        """Raise unless at least this share of the estimated time is ours in every capture.

        Raises:
            MatchError: Naming the capture that falls short.
        """
        for name, share in self.coverage.items():
            if share < coverage:
                raise MatchError(f"{self.model}: {share:.1%} of {name} is covered, {coverage:.1%} was required")
        return self

    def __str__(self) -> str:
        lines = [f"{self.model}: {sum(self.counts().values())} places run kernels"]
        lines += [f"  {name:28} {count}" for name, count in sorted(self.counts().items())]
        lines += [f"  estimated coverage of {name}: {share:.1%}" for name, share in self.coverage.items()]
        lines += [f"  {name} was not captured: {why}" for name, why in self.problems.items()]
        lines += [f"  {check}" for check in self.checks]
        misses = self.misses()
        lines += [f"  not: {line}" for line in misses[:8]]
        if len(misses) > 8:
            lines.append(f"  and {len(misses) - 8} more in .misses()")
        return "\n".join(lines)


def _written_coverage(outcome: Outcome, made: EmitResult) -> float:
    written = {id(w.match) for w in made.written}
    ours = sum(p.seconds_after for p in outcome.chosen if id(p.match) in written)
    lost = sum(p.seconds_before for p in outcome.chosen if id(p.match) not in written)
    total = ours + lost + sum(seconds for _, seconds in outcome.uncovered)
    return ours / total if total else 0.0
