"""Draft Definitions for what no kernel covers: runnable reference, sizes, links to the model's own lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, Node

from .export import site_of
from .normalize.views import view_nodes
from .results import Site
from .survey import PhaseSurvey, Survey, op_name

_TRANSFORMERS = (
    "https://github.com/huggingface/transformers/blob/v{version}/src/transformers/{path}#L{first}-L{last}"
)
_MAX_NODES = 60


@dataclass(frozen=True)
class Region:
    """Uncovered calls of one module that can be computed together.

    Attributes:
        nodes: In graph order.
        inputs: Values from outside, in order of first use.
        outputs: Values that are read outside.
        site: Module and source of the slowest node.
        seconds: Estimated time of all its places.
        count: How many places have this very code.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    site: Site
    seconds: float
    count: int = 1


def regions(graph: Graph, covered: Iterable[Node], seconds: dict[Node, float]) -> list[Region]:
    """Group a normal graph's uncovered calls into convex regions, one per distinct code, slowest first."""
    covered = set(covered)
    label = {n: "covered" if n in covered else site_of(n).module_path for n in graph.nodes}
    depth: dict[Node, int] = {}
    for node in graph.nodes:  # leaving a group and coming back raises the depth, so equal depths are convex
        steps = [
            depth[a] + (label[a] != label[node]) for a in node.all_input_nodes if a.op == "call_function"
        ]
        depth[node] = max(steps, default=0)
    together = nx.Graph()
    for node in graph.nodes:
        if node.op == "call_function" and node not in covered:
            together.add_node(node)
            near = [a for a in node.all_input_nodes if a in together]
            together.add_edges_from(
                (node, a) for a in near if (label[a], depth[a]) == (label[node], depth[node])
            )
    position = {node: i for i, node in enumerate(graph.nodes)}
    found = [_region(sorted(c, key=position.__getitem__), seconds) for c in nx.connected_components(together)]
    return _distinct(r for r in found if r is not None)


def _region(nodes: Sequence[Node], seconds: dict[Node, float]) -> Region | None:
    inside, views = set(nodes), view_nodes()
    total = sum(seconds.get(n, 0.0) for n in nodes)
    if total <= 0 or len(nodes) > _MAX_NODES or all(n.target in views for n in nodes):
        return None
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    outputs = tuple(n for n in nodes if any(u not in inside for u in n.users))
    if not inputs or not outputs or not all(_is_plain(n) for n in (*inputs, *nodes)):
        return None
    slowest = max(nodes, key=lambda n: seconds.get(n, 0.0))
    return Region(tuple(nodes), inputs, outputs, site_of(slowest), total)


def _is_plain(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        return False
    return node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload)


def _distinct(found: Iterable[Region]) -> list[Region]:
    merged: dict[str, Region] = {}
    for region in found:
        code = reference_of(region)
        known = merged.get(code)
        if known:
            region = Region(
                known.nodes,
                known.inputs,
                known.outputs,
                known.site,
                known.seconds + region.seconds,
                known.count + 1,
            )
        merged[code] = region
    return sorted(merged.values(), key=lambda r: -r.seconds)


def reference_of(region: Region) -> str:
    """The region as a Python function ``run``, without its ``# Source:`` lines."""
    names = {node: f"x{i}" for i, node in enumerate(region.inputs)}
    names.update({node: f"t{i}" for i, node in enumerate(region.nodes)})
    lines = [f"def run({', '.join(names[n] for n in region.inputs)}):"]
    lines += [f"    {names[n]} = {_call(n, names)}" for n in region.nodes]
    lines.append(f"    return {', '.join(names[n] for n in region.outputs)}")
    return "import torch\n\n\n" + "\n".join(lines) + "\n"


def _call(node: Node, names: dict[Node, str]) -> str:
    first = names[next(iter(node.all_input_nodes))] if node.all_input_nodes else None
    arguments = [_text(a, names, first) for a in node.args]
    arguments += [f"{k}={_text(v, names, first)}" for k, v in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _text(value: Any, names: dict[Node, str], first: str | None) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, torch.device):
        return f"{first}.device" if first else "'cpu'"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v, names, first) for v in value)}]"
    return repr(value)


def draft_of(region: Region, model_type: str, phase: str, taken: set[str]) -> dict[str, Any]:
    """The region as a Definition in JSON form; its name is new among ``taken``."""
    sizes = sorted({s for n in (*region.inputs, *region.outputs) for s in n.meta["val"].shape})
    owner = region.site.module_class or "the model"
    return {
        "name": _name(region, taken),
        "description": f"Draft of what {owner} computes here, in {region.count} places.",
        "op_type": "draft",
        "tags": [f"model:{model_type}", f"stage:{phase}", "status:draft"],
        "axes": {f"d{s}": {"type": "const", "value": s} for s in sizes},
        "inputs": {f"x{i}": _tensor(n) for i, n in enumerate(region.inputs)},
        "outputs": {f"y{i}": _tensor(n) for i, n in enumerate(region.outputs)},
        "constraints": [],
        "reference": "\n".join([*(f"# Source: {link}" for link in sources_of(region)), reference_of(region)]),
    }


def _tensor(node: Node) -> dict[str, Any]:
    value = node.meta["val"]
    return {"shape": [f"d{s}" for s in value.shape], "dtype": str(value.dtype).removeprefix("torch.")}


def _name(region: Region, taken: set[str]) -> str:
    words = [re.sub(r"(?<!^)(?=[A-Z])", "_", region.site.module_class or "model").lower()]
    counted = [op_name(n).rpartition(".")[2] for n in region.nodes if n.target not in view_nodes()]
    words += list(dict.fromkeys(counted))[:3]
    stem = re.sub(r"\W+", "_", "_".join(words)).strip("_")
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
    folder.mkdir(parents=True, exist_ok=True)
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
                file.write_text(json.dumps(draft, indent=2) + "\n", encoding="utf-8")
                written.append(file)
    return written


def phase_regions(phase: PhaseSurvey) -> list[Region]:
    """The uncovered regions of one phase, slowest first."""
    if phase.graph is None or phase.outcome is None:
        return []
    covered = [n for p in phase.outcome.chosen for n in p.match.nodes]
    return regions(phase.graph.graph_module.graph, covered, dict(phase.outcome.uncovered))
