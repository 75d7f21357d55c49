"""Which region is next: the uncovered ones of every call, the slowest first, each as a draft."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import Graph

from tilegym_fx.draft import Region, draft_variants, reference_of, regions
from tilegym_fx.emit import why_not
from tilegym_fx.errors import InventoryError, PatternError
from tilegym_fx.export import site_of
from tilegym_fx.inventory import Inventory, load
from tilegym_fx.inventory.sizes import CannotTryError
from tilegym_fx.inventory.trial import try_function
from tilegym_fx.match import Matcher
from tilegym_fx.pattern import Pattern, patterns_of
from tilegym_fx.pipeline import Outcome
from tilegym_fx.schema import Definition
from tilegym_fx.synth import can_write

from .subject import Call, Subject


@dataclass(frozen=True)
class Found:
    """What the pass found in a call.

    Attributes:
        call: The call.
        graph: A copy of its graph, in normal form.
        outcome: What is in it.
    """

    call: Call
    graph: Graph
    outcome: Outcome


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


def choices(subject: Subject, found: Sequence[Found], taken: set[str]) -> Iterator[Choice]:
    """Uncovered regions of all calls, the slowest first, each code once.

    Args:
        subject: The model.
        found: What the pass found in each call.
        taken: Names that no draft may have.
    """
    known: dict[str, tuple[Region, str, bool]] = {}
    for one in found:
        covered = [n for p in one.outcome.chosen for n in p.match.nodes]
        seconds = dict(one.outcome.uncovered)
        for allowed in (can_write, None):
            for region in regions(one.graph, covered, seconds, allowed=allowed):
                writable = all(can_write(n) for n in region.nodes)
                known.setdefault(key_of(region), (region, one.call.name, writable))
    ordered = sorted(known.items(), key=lambda item: -item[1][0].seconds)
    for key, (region, phase, writable) in ordered:
        drafts = draft_variants(region, subject.model_type, phase, set(taken), subject.batch, subject.seq)
        for draft in drafts:
            draft["tags"] = [t for t in draft["tags"] if not t.startswith("stage:") or phase != "call"]
        yield Choice(key, region, tuple(drafts), writable)


def key_of(region: Region) -> str:
    """A short name for the region's code."""
    return hashlib.sha256(reference_of(region).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Draft:
    """A region as a Definition that can be searched for.

    Attributes:
        record: As it is written to a file.
        definition: The same.
        patterns: What is searched for.
    """

    record: Mapping[str, Any]
    definition: Definition
    patterns: tuple[Pattern, ...]


def searchable(drafts: Sequence[Mapping[str, Any]]) -> Draft | None:
    """The first draft that computes what it declares, and from which a Pattern can be traced."""
    for record in drafts:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("definitions", "solutions"):
                Path(folder, name).mkdir()
            Path(folder, "definitions", f"{record['name']}.json").write_text(json.dumps(record), encoding="utf-8")
            patterns = _patterns_of(Path(folder), record["name"])
        if patterns:
            return Draft(record, Definition.model_validate(record), patterns)
    return None


def _patterns_of(root: Path, name: str) -> tuple[Pattern, ...]:
    try:
        inventory = load(root, shipped=False)
        if not _computes_what_it_declares(inventory, name):
            return ()
        return tuple(patterns_of(inventory, name))
    except (InventoryError, PatternError):
        return ()


def _computes_what_it_declares(inventory: Inventory, name: str) -> bool:
    """Whether sizes that are alike by chance, as half a head and a small width, have not become one axis."""
    try:
        return not try_function(inventory.definitions[name], inventory.reference(name))
    except CannotTryError:
        return True
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False


def hindrance_in_source(draft: Draft, found: Sequence[Found]) -> str:
    """Why no place of a draft can be written into the model's source; empty if one can, or nothing is known of it."""
    matcher, reasons = Matcher({draft.definition.name: draft.definition}, draft.patterns), []
    for one in found:
        provenance = one.call.provenance
        if provenance is None:
            return ""
        matches, _ = matcher.match(one.graph, site_of)
        for match in matches:
            reason = why_not(match, provenance)
            if reason is None:
                return ""
            reasons.append(reason)
    return reasons[0] if reasons else "its draft is not found in the model"
