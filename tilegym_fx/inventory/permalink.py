"""``# Source:`` lines: links to the code that a reference or spelling restates, on a commit or a release."""

from __future__ import annotations

import re

SOURCE_PREFIX = "# Source:"

_GITHUB = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/blob/(?P<revision>[^/#?]+)/(?P<path>[^#?]+)(?:#(?P<anchor>.*))?"
)
_HUB = re.compile(
    r"https://huggingface\.co/[\w.-]+(?:/[\w.-]+)?/blob/(?P<revision>[^/#?]+)/(?P<path>[^#?]+)(?:#(?P<anchor>.*))?"
)
_ANCHOR = re.compile(r"L(?P<first>[1-9]\d*)(?:-L(?P<last>[1-9]\d*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RELEASE = re.compile(r"v?\d+\.\d+(?:\.\d+)*(?:[.-]?(?:a|b|rc|post|dev)\.?\d+)?")


def source_links(reference: str) -> tuple[str, ...]:
    """The links of the ``# Source:`` lines that a reference begins with."""
    links = []
    for line in reference.splitlines():
        if not line.startswith(SOURCE_PREFIX):
            break
        links.append(line[len(SOURCE_PREFIX) :].strip())
    return tuple(links)


def permalink_problem(link: str) -> str | None:
    """Says why a link does not lead to the same lines for ever, or None if it does."""
    found = _GITHUB.fullmatch(link) or _HUB.fullmatch(link)
    if not found:
        return f"{link!r} is no link to a file on github.com or huggingface.co (/blob/<revision>/<path>#L1-L9)"
    revision = found["revision"]
    if not (_COMMIT.fullmatch(revision) or _RELEASE.fullmatch(revision)):
        return f"{link!r} is on {revision!r}, which is neither a full commit SHA nor a release tag"
    lines = _ANCHOR.fullmatch(found["anchor"] or "")
    if not lines:
        return f"{link!r} does not end in line numbers (#L10 or #L10-L20)"
    if lines["last"] and int(lines["last"]) < int(lines["first"]):
        return f"{link!r} ends before it begins"
    return None
