"""Reasons of near misses, to be compared between captures of one model."""

from __future__ import annotations

import re
from collections.abc import Iterable


def unnumbered(lines: Iterable[str]) -> list[str]:
    """Reasons without the numbers of nodes and layers in them."""
    return [re.sub(r"(?<=[_.])\d+", "", line) for line in lines]
