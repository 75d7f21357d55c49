"""What looking at dropped code gives: facts, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Refusal(Exception):
    """Why a place cannot be written in source form."""


class FinalRefusal(Refusal):
    """A refusal that no enclosing function can mend."""


@dataclass
class Facts:
    """What was found in the dropped code.

    Attributes:
        guards: Conditions on the rewritten function's own names, in the order in which they were met.
        constants: Path below the rewritten function's `self` -> the value that was read there.
        imports: Names that the guards use -> the module to import them from.
        modules: Path below `self` -> class of a module whose call is dropped.
        dtypes: Path below `self` -> dtype of a parameter that the kernel gets.
        floats: Expressions that gave a number to the dropped code -> the number.
        dropped: Module and name of a function whose code is gone -> sha256 of its text.
    """

    guards: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    modules: dict[str, type] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    floats: dict[str, Any] = field(default_factory=dict)
    dropped: dict[tuple[str, str], str] = field(default_factory=dict)
