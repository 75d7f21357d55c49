"""What ``kernelize`` did to a model, for a person to print and a script to check."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from .apply import GivenBack
from .errors import MatchError, UsageError
from .export import site_of
from .layers import Copies
from .results import EmitResult, PlannedMatch, Rejection, Written, misses, places, told
from .verify import Check

if TYPE_CHECKING:
    from .pipeline import Outcome

_SHOWN = 8
_KEPT = "  the places are those that an earlier start found and verified (TILEGYM_FX_PLANS=0 searches anew)"


class Place(NamedTuple):
    """One place of a captured call that calls an op of ours, or would.

    Attributes:
        definition: What it computes.
        path: Path of its module.
        before: Estimated time of the author's own operations.
        after: Estimated time of the kernel.
    """

    definition: str
    path: str
    before: float
    after: float


@dataclass(frozen=True)
class Estimate:
    """Estimated device time of one call of the model.

    Attributes:
        ours: Every place that calls an op of ours.
        others: Everything else.
    """

    ours: tuple[Place, ...]
    others: float

    def coverage(self, without: frozenset[str] = frozenset()) -> float:
        """Share of the time in our kernels, 0 to 1; modules in ``without`` run their author's code."""
        kernels = sum(place.after for place in self.ours if place.path not in without)
        authors = sum(place.before for place in self.ours if place.path in without)
        total = kernels + authors + self.others
        return kernels / total if total else 0.0

    def counts(self) -> dict[str, int]:
        """Definition -> places."""
        return dict(Counter(place.definition for place in self.ours))


@dataclass(frozen=True)
class Report:
    """What was applied where, what was not and why, and the numbers that judged it.

    Attributes:
        model: Class of the model.
        text: The emitted module that runs.
        written: Every place that calls an op of ours, once for each capture that it was found in.
        rejections: Every place that nearly fits, or fits and was not taken.
        estimates: Capture (``prefill``, ``decode``...) -> estimated times.
        graph_form: The same for ``torch.compile(model, backend="tilegym_fx")``, which can use every place.
        problems: Capture -> why it could not be made.
        checks: Outputs compared with the original's; empty without ``verify`` or on ``meta``.
        no_wider: Why no run in a wider dtype judged, only the model's own; empty where one did.
        seconds: Wall time of capturing, matching and writing.
        in_both_forms: How many places of ``graph_form`` the emitted module has too, over all captures.
        given_back: Modules that run their author's code again, because of what was put on them since.
        device: Whose times are estimated.
        runs: What ops run where the model is now; empty before it is applied.
        copied: How many layers were not captured, as others that are like them stood for them.
        whole: Why every layer was captured although many are alike; empty where it was not so.
        chooses: Whether the model chooses by scores, as a mixture of experts does.
        kept: Whether the places were found by an earlier start, and only verified by this one.
        not_kept: Why the next start will search again; empty where it need not, or has been told to.
        judged_by_places: Why it was judged place by place, and what came of it; empty where its outputs were enough.
    """

    model: str
    text: str
    written: tuple[Written, ...]
    rejections: tuple[Rejection, ...]
    estimates: Mapping[str, Estimate]
    problems: Mapping[str, str]
    checks: tuple[Check, ...] = ()
    no_wider: str = ""
    seconds: float = 0.0
    given_back: tuple[GivenBack, ...] = ()
    graph_form: Mapping[str, Estimate] = field(default_factory=dict)
    in_both_forms: int = 0
    device: str = ""
    runs: str = ""
    copied: int = 0
    whole: str = ""
    chooses: bool = False
    judged_by_places: str = ""
    kept: bool = False
    not_kept: str = ""

    @classmethod
    def of(cls, model: nn.Module, made: EmitResult, outcomes: Mapping[str, Outcome], problems: Mapping[str, str],
           seconds: float, copies: Copies, whole: str = "", chooses: bool = False) -> Report:  # fmt: skip
        """The report of a planned and written model; a layer that stands for others is counted for them too."""
        found = [*made.refused, *(r for outcome in outcomes.values() for r in outcome.rejections)]
        estimates = {name: _estimate(outcome, made, copies) for name, outcome in outcomes.items()}
        anywhere = {name: _anywhere(outcome, copies) for name, outcome in outcomes.items()}
        shared = sum(_shared(outcome, made, copies) for outcome in outcomes.values())
        device = next((outcome.device for outcome in outcomes.values()), "")
        return cls(type(model).__name__, made.text, made.written, tuple(_everywhere(found, copies)), estimates,
                   dict(problems), seconds=seconds, graph_form=anywhere, in_both_forms=shared, device=device,
                   copied=sum(map(len, copies.of_layer.values())), whole=whole, chooses=chooses)  # fmt: skip

    def with_checks(self, checks: Sequence[Check], no_wider: str = "", places: str = "") -> Report:
        return replace(self, checks=tuple(checks), no_wider=no_wider, judged_by_places=places)

    @property
    def coverage(self) -> dict[str, float]:
        """Capture -> estimated share of device time in our kernels as the model is now, 0 to 1."""
        return {name: estimate.coverage(self._lost) for name, estimate in self.estimates.items()}

    @property
    def _lost(self) -> frozenset[str]:
        return frozenset(back.path for back in self.given_back)

    def counts(self) -> dict[str, int]:
        """Definition -> places that run it now."""
        lost = self._lost
        written = [w for w in self.written if w.module_path not in lost]
        places = {(w.match.definition, w.module_path, w.method, w.line, w.column, w.guards, w.part) for w in written}
        return dict(Counter(place[0] for place in places))

    def misses(self) -> list[str]:
        """The reasons, nearest first, each in one line with its first place; ``rejections`` has every place."""
        return misses(self.rejections)

    def require(self, *, coverage: float) -> Report:
        """Raise unless at least this share of the estimated time, from 0 to 1, is ours in every capture.

        Raises:
            MatchError: Naming the capture that falls short.
            UsageError: That is no share.
        """
        if not 0 <= coverage <= 1:
            raise UsageError(f"coverage={coverage} is no share", advice="Give one from 0 to 1, such as 0.8")
        for name, share in self.coverage.items():
            if share < coverage:
                raise MatchError(f"{self.model}: {share:.1%} of {name} is covered, {coverage:.1%} was required")
        return self

    def __str__(self) -> str:
        lines = [f"{self.model}: {places(sum(self.counts().values()), self.runs)}"]
        lines += [f"  {name:28} {count}" for name, count in sorted(self.counts().items())]
        for name, share in self.coverage.items():
            anywhere = self.graph_form[name].coverage()
            on = f" on {self.device}" if self.device else ""
            lines.append(f"  estimated coverage of {name}{on}: {share:.1%}, in graph form {anywhere:.1%}")
        lines += [_KEPT] if self.kept else []
        lines += [f"  the next start searches again: {self.not_kept}"] if self.not_kept else []
        lines += [f"  {name} was not captured: {why}" for name, why in self.problems.items()]
        lines += [f"  every layer was captured, although many are alike: {self.whole}"] if self.whole else []
        lines += [f"  {check}" for check in self.checks]
        if self.no_wider:
            lines.append(
                f"  the checks compare with the model's own run, not with one in a wider dtype: {self.no_wider}"
            )
        if self.judged_by_places:
            lines.append(f"  judged place by place, as {self.judged_by_places}")
        lines += [f"  {back}" for back in self.given_back[:_SHOWN]]
        if len(self.given_back) > _SHOWN:
            lines.append(f"  and {len(self.given_back) - _SHOWN} more in .given_back")
        lines += told(self.misses(), _SHOWN, ".misses()")
        return "\n".join(lines)


def _everywhere(found: Iterable[Rejection], copies: Copies) -> Iterator[Rejection]:
    for rejection in found:
        yield rejection
        for path in copies.of(rejection.site.module_path):
            yield replace(rejection, site=replace(rejection.site, module_path=path))


def _estimate(outcome: Outcome, made: EmitResult, copies: Copies) -> Estimate:
    paths: dict[int, list[str]] = defaultdict(list)
    for written in made.written:
        paths[id(written.match)].append(written.module_path)
    ours = [_place(p, path) for p in outcome.chosen for path in paths[id(p.match)]]
    return _of_places(ours, outcome, copies)


def _anywhere(outcome: Outcome, copies: Copies) -> Estimate:
    ours = [_place(p, path) for p in _free(outcome) for path in _paths(p, copies)]
    return _of_places(ours, outcome, copies)


def _of_places(ours: Sequence[Place], outcome: Outcome, copies: Copies) -> Estimate:
    """What is not ours is the rest of the call as its author wrote it."""
    whole = sum(p.seconds_before * len(_paths(p, copies)) for p in outcome.chosen)
    whole += sum(seconds * (1 + len(copies.of(site_of(node).module_path))) for node, seconds in outcome.uncovered)
    return Estimate(tuple(ours), whole - sum(place.before for place in ours))


def _shared(outcome: Outcome, made: EmitResult, copies: Copies) -> int:
    written = {id(w.match) for w in made.written}
    keys = {(p.match.definition, p.match.outputs) for p in outcome.chosen if id(p.match) in written}
    return sum(len(_paths(p, copies)) for p in _free(outcome) if (p.match.definition, p.match.outputs) in keys)


def _free(outcome: Outcome) -> Sequence[PlannedMatch]:
    """What graph form would choose."""
    return outcome.chosen if outcome.anywhere is None else outcome.anywhere


def _paths(planned: PlannedMatch, copies: Copies) -> tuple[str, ...]:
    """Where a Match is found, in the captured layer and in those that it stands for."""
    path = planned.match.site.module_path
    return (path, *copies.of(path))


def _place(planned: PlannedMatch, path: str) -> Place:
    return Place(planned.match.definition, path, planned.seconds_before, planned.seconds_after)
