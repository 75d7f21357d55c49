"""Draft Definitions for what no kernel covers: runnable reference, sizes, links to the model's own lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch.fx import Node

from .errors import make_folder, writing
from .export import site_of
from .normalize.views import view_nodes
from .reference import text_of
from .region import Region, reference_of, regions
from .survey import PhaseSurvey, Survey, op_name

__all__ = [
    "Region",
    "draft_of",
    "draft_variants",
    "free_sizes",
    "phase_regions",
    "reference_of",
    "regions",
    "sources_of",
    "write_drafts",
]

#: Names of variable axes, for sizes in the order of their first use.
_LETTERS = ("H", "I", "K", "M", "D", "R", "T", "L")
#: Where a word of a class's name ends: GPTNeoXLayer is gpt_neo_x_layer.
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v{version}/src/transformers/{path}#L{first}-L{last}"


def draft_of(
    region: Region, model_type: str, phase: str, taken: set[str], free: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """The region as a Definition in JSON form; its name is new among ``taken``.

    Args:
        region: What to define.
        model_type: Of the model that it is from.
        phase: ``prefill`` or ``decode``.
        taken: Names in use; the new one is added.
        free: Size -> name of the variable axis that it is; every other size is a constant.
    """
    free = free or {}
    values = (*region.inputs, *region.outputs)
    sizes = sorted({s for n in values for s in n.meta["val"].shape})
    code = text_of(region.nodes, region.inputs, region.outputs, frozenset(free))
    axes: dict[str, Any] = {
        free.get(s, f"d{s}"): {"type": "var"} if s in free else {"type": "const", "value": s} for s in sizes
    }
    owner = region.site.module_class or "the model"
    places = f"{region.count} places" if region.count > 1 else "1 place"
    return {
        "name": _name(region, taken),
        "description": f"Draft of what {owner} computes here, in {places}.",
        "op_type": "draft",
        "tags": [f"model:{model_type}", f"stage:{phase}", "status:draft"],
        "axes": axes,
        "inputs": {f"x{i}": _tensor(n, free) for i, n in enumerate(region.inputs)},
        "outputs": {f"y{i}": _tensor(n, free) for i, n in enumerate(region.outputs)},
        "constraints": [],
        "reference": "\n".join([*(f"# Source: {link}" for link in sources_of(region)), code]),
    }


def draft_variants(
    region: Region, model_type: str, phase: str, taken: set[str], batch: int, seq: int
) -> list[dict[str, Any]]:
    """The region as a Definition with as many variable axes as possible, then with fewer, then with none.

    Which of them its code allows shows when it is traced.

    Args:
        region: Captured at a batch and a length that are no size of the model itself.
        model_type: Of the model that it is from.
        phase: ``prefill`` or ``decode``.
        taken: Names in use; the new one is added.
        batch: Sequences.
        seq: Tokens.
    """
    free = free_sizes(region, batch, seq)
    calls = {size: name for size, name in free.items() if name in ("B", "S", "N")}
    drafts: list[dict[str, Any]] = []
    for sizes in (free, calls, {}):
        draft = draft_of(region, model_type, phase, set(taken), sizes)
        if draft not in drafts:
            drafts.append(draft)
    taken.add(drafts[0]["name"])
    return drafts


def free_sizes(region: Region, batch: int, seq: int) -> dict[int, str]:
    """Size -> name of an axis, for every size that can be another one without the region's code changing.

    Args:
        region: Captured at a batch and a length that are no size of the model itself.
        batch: Sequences.
        seq: Tokens.
    """
    free = {batch: "B", seq: "S", batch * seq: "N"}
    code = text_of(region.nodes, region.inputs, region.outputs, frozenset(free))
    literals = {int(word) for word in re.findall(r"(?<![\w.])\d+(?![\w.])", code)}
    values = (*region.inputs, *region.outputs)
    sizes = dict.fromkeys(s for n in values for s in reversed(n.meta["val"].shape))
    letters = iter(_LETTERS)
    for size in sizes:
        if size not in free and size not in literals and size != 1:
            free[size] = next(letters, f"A{size}")
    return {size: free[size] for size in sizes if size in free}


def _tensor(node: Node, free: Mapping[int, str]) -> dict[str, Any]:
    value = node.meta["val"]
    shape = [free.get(s, f"d{s}") for s in value.shape]
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def _name(region: Region, taken: set[str]) -> str:
    words = [_WORD_ENDS.sub("_", region.site.module_class or "model").lower()]
    counted = [op_name(n).rpartition(".")[2] for n in region.nodes if n.target not in view_nodes()]
    words += list(dict.fromkeys(counted))[:3]
    stem = re.sub(r"_+", "_", re.sub(r"\W+", "_", "_".join(words))).strip("_")
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    taken.add(name)
    return name


def sources_of(region: Region) -> Iterator[str]:
    """One link for each file of the region, at the installed transformers version; else file and lines."""
    lines: dict[str, list[int]] = {}
    for node in region.nodes:
        frame = site_of(node).innermost
        if frame is not None:
            lines.setdefault(frame.file, []).append(frame.line)
    for file, numbers in lines.items():
        first, last = min(numbers), max(numbers)
        _, found, path = file.replace("\\", "/").rpartition("/transformers/")
        if found:
            yield _TRANSFORMERS.format(version=version("transformers"), path=path, first=first, last=last)
        else:
            yield f"{Path(file).name}#L{first}-L{last}"


def write_drafts(found: Survey, folder: Path) -> list[Path]:
    """Write one ``<name>.json`` for each uncovered region of every phase; returns the files."""
    make_folder(folder)
    taken: set[str] = set()
    seen: set[str] = set()
    written = []
    for phase in found.phases:
        for region in phase_regions(phase):
            code = reference_of(region)
            if code not in seen:
                seen.add(code)
                draft = draft_of(region, found.source.model_type, phase.phase, taken)
                file = folder / f"{draft['name']}.json"
                with writing(file):
                    file.write_text(json.dumps(draft, indent=2) + "\n", encoding="utf-8")
                written.append(file)
    return written


def phase_regions(phase: PhaseSurvey, *, allowed: Callable[[Node], bool] | None = None) -> list[Region]:
    """The uncovered regions of one phase, slowest first; see :func:`tilegym_fx.region.regions`."""
    if phase.graph is None or phase.outcome is None:
        return []
    covered = [n for p in phase.outcome.chosen for n in p.match.nodes]
    return regions(phase.graph.graph_module.graph, covered, dict(phase.outcome.uncovered), allowed=allowed)
