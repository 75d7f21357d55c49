"""What is known of one model type after it has been tried; a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Counts = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """One model type.

    Attributes:
        model_type: Its name in transformers.
        class_name: Class of the model; empty when it could not be built.
        seconds: Wall time of everything.
        exported: Phase -> ``whole``, ``without X, Y`` for blocks that had to be left out, or why not.
        places: Category -> matched places and all places of a realistic prefill.
        coverage: Phase -> estimated share of device time in kernels, 0 to 1, of the default configuration.
        uncovered: The operations with the largest shares of prefill time that no kernel takes, with these shares.
        written: Category -> places of the tiny prefill whose kernel is in the applied source, and all places.
        applied: Places of the tiny model that run kernels.
        verified: Whether :func:`tilegym_fx.kernelize` found the outputs equal; None where nothing was applied.
        steps: The calls of which the outputs were compared.
        difference: Largest difference of the logits to the original's, over the largest logit.
        restored: Whether ``restore`` gave back the same classes and bit for bit the same logits.
        problem: Why the tiny model was not kernelized, verified or restored, or which of its calls could not be
            captured; empty when nothing was in the way.
        misses: Near misses, a line each.
        definitions: Definition -> places for which a plan chose it: in both calls of the default configuration, and
            in the applied source of the tiny model.
    """

    model_type: str
    class_name: str = ""
    seconds: float = 0.0
    exported: Mapping[str, str] = field(default_factory=dict)
    places: Counts = field(default_factory=dict)
    coverage: Mapping[str, float] = field(default_factory=dict)
    uncovered: tuple[tuple[str, float], ...] = ()
    written: Counts = field(default_factory=dict)
    applied: int = 0
    verified: bool | None = None
    steps: tuple[str, ...] = ()
    difference: float | None = None
    restored: bool | None = None
    problem: str = ""
    misses: tuple[str, ...] = ()
    definitions: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_exported(self) -> bool:
        """Whether the prompt's call was captured, whole or with blocks left out."""
        return is_captured(self.exported.get("prefill", ""))

    @property
    def is_right(self) -> bool:
        """Kernelized, with equal logits in every call, and restored."""
        return bool(self.applied and self.verified and self.restored)

    @property
    def lowest_coverage(self) -> float:
        """The lower of the phases' estimated coverages; 0 when no phase was captured."""
        return min(self.coverage.values(), default=0.0)

    def every(self, category: str) -> bool:
        """Whether every place of a category is matched, or there is none."""
        ours, places = self.places.get(category, (0, 0))
        return ours == places

    def line(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Row:
        """The row that a line of JSON holds; fields that it does not know are left out."""
        known = {f.name for f in fields(cls)}
        data: dict[str, Any] = {k: v for k, v in json.loads(line).items() if k in known}
        for name in ("places", "written"):
            data[name] = {category: tuple(pair) for category, pair in data.get(name, {}).items()}
        for name in ("uncovered", "steps", "misses"):
            data[name] = tuple(tuple(item) if isinstance(item, list) else item for item in data.get(name, ()))
        return cls(**data)


def is_captured(outcome: str) -> bool:
    """Whether an entry of ``Row.exported`` says that there is a graph."""
    return outcome == "whole" or outcome.startswith("without ")
