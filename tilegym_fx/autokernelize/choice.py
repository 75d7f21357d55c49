"""Which region is next: the uncovered ones of every call, the slowest first, each as a draft."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_fx.draft import Region, draft_variants, reference_of, regions
from tilegym_fx.errors import InventoryError, PatternError
from tilegym_fx.inventory import load
from tilegym_fx.pattern import patterns_of
from tilegym_fx.pipeline import Outcome
from tilegym_fx.schema import Definition
from tilegym_fx.synth import can_write

from .subject import Subject


@dataclass(frozen=True)
class Choice:
    """An uncovered region.

    Attributes:
        key: The same for the same code in every run.
        region: The region.
        drafts: The region as a Definition, with as many variable axes as possible first.
        writable: Whether a kernel might be synthesised: every operation is in the vocabulary.
    """

    key: str
    region: Region
    drafts: tuple[Mapping[str, Any], ...]
    writable: bool


def choices(subject: Subject, outcomes: Sequence[Outcome], taken: set[str]) -> Iterator[Choice]:
    """Uncovered regions of all calls, the slowest first, each code once.

    Args:
        subject: The model.
        outcomes: What the pass found in each call.
        taken: Names that no draft may have.
    """
    found: dict[str, tuple[Region, str, bool]] = {}
    for call, outcome in zip(subject.calls, outcomes, strict=True):
        covered = [n for p in outcome.chosen for n in p.match.nodes]
        graph, seconds = call.graph.graph_module.graph, dict(outcome.uncovered)
        for allowed in (can_write, None):
            for region in regions(graph, covered, seconds, allowed=allowed):
                writable = all(can_write(n) for n in region.nodes)
                found.setdefault(key_of(region), (region, call.name, writable))
    ordered = sorted(found.items(), key=lambda item: -item[1][0].seconds)
    for key, (region, phase, writable) in ordered:
        drafts = draft_variants(region, subject.model_type, phase, set(taken), subject.batch, subject.seq)
        for draft in drafts:
            draft["tags"] = [t for t in draft["tags"] if not t.startswith("stage:") or phase != "call"]
        yield Choice(key, region, tuple(drafts), writable)


def key_of(region: Region) -> str:
    """A short name for the region's code."""
    return hashlib.sha256(reference_of(region).encode()).hexdigest()[:12]


def searchable(drafts: Sequence[Mapping[str, Any]]) -> Definition | None:
    """The first draft from which a Pattern can be traced."""
    for draft in drafts:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("definitions", "solutions"):
                Path(folder, name).mkdir()
            Path(folder, "definitions", f"{draft['name']}.json").write_text(json.dumps(draft), encoding="utf-8")
            if _has_patterns(Path(folder), draft["name"]):
                return Definition.model_validate(draft)
    return None


def _has_patterns(root: Path, name: str) -> bool:
    try:
        return bool(patterns_of(load(root, shipped=False), name))
    except (InventoryError, PatternError):
        return False
