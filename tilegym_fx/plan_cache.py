"""Rewritings that were found and verified before, kept on disk: a second start of the same model searches for nothing.

What is kept is the emitted text and what a report says of it. It is applied and verified as one that was just made, and
made anew where it does not fit: what is kept saves time, and nothing hangs on it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from torch import nn

from . import settings
from .apply import save
from .cost import device_of
from .fingerprint import fingerprint
from .inventory.layout import shipped_root
from .live_model import model_device
from .live_report import Estimate, Report
from .results import Frame, Match, MatchKind, Rejection, Site, Written

log = logging.getLogger("tilegym_fx")
#: Plans that are kept, the latest; each is some hundred kilobytes.
_MOST = 200
_SHIPPED = ("definitions/**/*.json", "solutions/**/*.json", "patterns/*.py", "kernels/*.py")


def place_of(model: nn.Module, only: Collection[str] | None, skip: Collection[str]) -> Path | None:
    """The file for the rewriting of a model that `kernelize` calls with ``input_ids``, whether it exists or not.

    Args:
        model: As it is to be captured.
        only: Definitions to use, or None.
        skip: Definitions to leave out.

    Returns:
        None where nothing is kept: it is switched off (``TILEGYM_FX_PLANS``), or other inventories are searched too.

    Raises:
        NoFingerprintError: If no other process could be sure that it has the same model.
    """
    if not settings.keeps_plans() or settings.inventory_roots():
        return None
    model_is = fingerprint(model)
    asked = only if only is None else sorted(set(only)), sorted(set(skip)), device_of(model_device(model))
    key = hashlib.sha256(f"{_code_digest()} {model_is} {asked}".encode()).hexdigest()
    return settings.cache_folder() / "plans" / f"{key}.json"


def _code_digest() -> str:
    """Of all that takes part in a search: this package and what it ships."""
    own, root, digest = Path(__file__).parent, shipped_root(), hashlib.sha256()
    for file in (*sorted(own.rglob("*.py")), *sorted(file for each in _SHIPPED for file in root.glob(each))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Row(BaseModel):
    """A place that calls an op of ours: what is kept of a `Written`, the graph excepted."""

    definition: str
    spelling: str
    kind: MatchKind
    place: tuple[str, str, str, str, int, int, tuple[str, ...], int]

    @classmethod
    def of(cls, written: Written) -> _Row:
        match, w = written.match, written
        place = w.module_path, w.module_class, w.method, w.file, w.line, w.column, w.guards, w.part
        return cls(definition=match.definition, spelling=match.spelling, kind=match.kind, place=place)

    def written(self) -> Written:
        return Written(Match(self.definition, self.spelling, self.kind, {}, (), ()), *self.place)


class _Miss(BaseModel):
    """A reason and the modules that it was found in one after the other."""

    definition: str
    spelling: str
    reason: str
    depth: int
    module_class: str
    frames: tuple[tuple[str, int, str], ...]
    paths: list[str]

    def rejections(self) -> Iterator[Rejection]:
        frames = tuple(Frame(*frame) for frame in self.frames)
        for path in self.paths:
            site = Site(path, self.module_class, frames)
            yield Rejection(self.definition, self.spelling, lambda: self.reason, (), self.depth, site)


def _misses(rejections: Iterable[Rejection]) -> list[_Miss]:
    """In their order; a layer and those that it stands for follow each other, and are one row."""
    return [
        _Miss(**key, paths=[r.site.module_path for r in alike]) for key, alike in groupby(rejections, _but_for_path)
    ]


def _but_for_path(r: Rejection) -> dict[str, Any]:
    frames = tuple((frame.file, frame.line, frame.function) for frame in r.site.frames)
    return {"definition": r.definition, "spelling": r.spelling, "reason": r.reason, "depth": r.depth,
            "module_class": r.site.module_class, "frames": frames}  # fmt: skip


class _Kept(BaseModel):
    """A report without what each start finds itself: the checks, the time, what has been given back."""

    model: str
    text: str
    written: list[_Row]
    misses: list[_Miss]
    estimates: Mapping[str, Estimate]
    problems: Mapping[str, str]
    graph_form: Mapping[str, Estimate]
    in_both_forms: int
    device: str
    copied: int
    whole: str
    chooses: bool

    @model_validator(mode="after")
    def _same_calls(self) -> _Kept:
        if self.estimates.keys() != self.graph_form.keys():
            raise ValueError("estimates and graph_form are of different calls")
        return self

    def report(self) -> Report:
        rejections = tuple(rejection for miss in self.misses for rejection in miss.rejections())
        same = {name: getattr(self, name) for name in type(self).model_fields if name not in ("written", "misses")}
        return Report(**same, written=tuple(row.written() for row in self.written), rejections=rejections, kept=True)


def read(file: Path) -> Report | None:
    """The report that was kept, with the text in it; None where there is none, or none that can be read."""
    try:
        return _Kept.model_validate_json(file.read_text(encoding="utf-8")).report()
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def keep(file: Path, report: Report) -> str:
    """Write a report to be read by later starts. Gives why they will search again, where it cannot be written."""
    same = {name: getattr(report, name) for name in _Kept.model_fields if name not in ("written", "misses")}
    kept = _Kept(**same, written=[_Row.of(w) for w in report.written], misses=_misses(report.rejections))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(kept.model_dump_json(), file)
        _drop_oldest(file.parent)
    except OSError as why:
        return f"nothing can be kept in {file.parent}: {why.strerror or why}"
    return ""


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_MOST]:
        file.unlink(missing_ok=True)


def forget(file: Path) -> None:
    """Remove what does not fit the model that it was kept for."""
    try:
        file.unlink(missing_ok=True)
    except OSError as why:
        log.info("a plan that does not fit stays in the cache: %s", why)
