"""The namespaces and values that tags may have in an inventory of the repository form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from tilegym_fx.schema import DTypeName, Problem

_VALUE = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_TAG_VALUES: dict[str, frozenset[str] | None] = {
    "model": None,
    "stage": frozenset({"prefill", "decode", "training"}),
    "status": frozenset({"draft", "unverified", "verified"}),
    "dtype": frozenset(get_args(DTypeName)),
}
FLAGS = frozenset({"fused"})


def tag_problems(tags: tuple[str, ...], namespaces: tuple[str, ...], flags: frozenset[str]) -> Iterator[Problem]:
    """What is wrong with some tags.

    Args:
        tags: To look at.
        namespaces: Those that may be used here.
        flags: Tags without a namespace that may be used here.
    """
    for index, tag in enumerate(tags):
        if tag in tags[:index]:
            yield Problem("tags", f"{tag!r} is there twice", "remove one of them")
        elif tag not in flags and (advice := _advice(tag, namespaces, flags)):
            yield Problem("tags", f"{tag!r} is not known", advice)


def _advice(tag: str, namespaces: tuple[str, ...], flags: frozenset[str]) -> str | None:
    namespace, colon, value = tag.partition(":")
    if not colon or namespace not in namespaces:
        return f"use one of {', '.join((*(f'{name}:...' for name in namespaces), *sorted(flags)))}"
    allowed = _TAG_VALUES[namespace]
    if allowed is not None and value not in allowed:
        return f"use one of {', '.join(f'{namespace}:{name}' for name in sorted(allowed))}"
    return None if _VALUE.fullmatch(value) else "write the value with a-z, 0-9, dot, dash and _"
