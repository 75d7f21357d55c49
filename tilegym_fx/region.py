"""Uncovered calls of a normal graph, grouped into convex regions that one kernel could compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch
from torch.fx import Graph, Node

from .export import site_of
from .normalize.views import view_nodes
from .reference import text_of
from .results import Site

_MAX_NODES = 60
_CAST = torch.ops.aten.to.dtype
_SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True)
class Region:
    """Uncovered calls of one module that can be computed together.

    Attributes:
        nodes: In graph order.
        inputs: Values from outside, in order of first use.
        outputs: Values that are read outside.
        site: Module and source of the slowest node.
        seconds: Estimated or measured time of all its places.
        count: How many places have this very code.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    site: Site
    seconds: float
    count: int = 1


def reference_of(region: Region) -> str:
    """The region as a Python function ``run``, without its ``# Source:`` lines."""
    return text_of(region.nodes, region.inputs, region.outputs)


def regions(
    graph: Graph,
    covered: Iterable[Node],
    seconds: dict[Node, float],
    *,
    allowed: Callable[[Node], bool] | None = None,
) -> list[Region]:
    """Group a normal graph's uncovered calls into convex regions, one per distinct code, slowest first.

    Args:
        graph: In normal form.
        covered: Calls that kernels take.
        seconds: Time of each other call.
        allowed: Which calls a region may hold; regions then end where it says no, and have no views at
            their edges that only rearrange. By default every call of one module may be together.
    """
    covered = set(covered)
    if allowed is not None:
        covered |= {n for n in graph.nodes if n.op == "call_function" and not allowed(n)}
    groups = _together(graph, covered)
    if allowed is not None:
        groups = [part for nodes in groups for part in _parts(_trimmed(nodes))]
    return _distinct(r for nodes in groups if (r := _region(nodes, seconds)) is not None)


def _together(graph: Graph, covered: set[Node]) -> list[list[Node]]:
    label = {n: "covered" if n in covered else site_of(n).module_path for n in graph.nodes}
    depth: dict[Node, int] = {}
    for node in graph.nodes:  # leaving a group and coming back raises the depth, so equal depths are convex
        steps = [depth[a] + (label[a] != label[node]) for a in node.all_input_nodes if a.op == "call_function"]
        depth[node] = max(steps, default=0)
    together = nx.Graph()
    for node in graph.nodes:
        if node.op == "call_function" and node not in covered:
            together.add_node(node)
            near = [a for a in node.all_input_nodes if a in together]
            together.add_edges_from((node, a) for a in near if (label[a], depth[a]) == (label[node], depth[node]))
    position = {node: i for i, node in enumerate(graph.nodes)}
    return [sorted(c, key=position.__getitem__) for c in nx.connected_components(together)]


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """What hangs together, each part in graph order."""
    inside = nx.Graph()
    inside.add_nodes_from(nodes)
    inside.add_edges_from((n, a) for n in nodes for a in n.all_input_nodes if a in inside)
    position = {node: i for i, node in enumerate(nodes)}
    return [sorted(c, key=position.__getitem__) for c in nx.connected_components(inside)]


def _region(nodes: Sequence[Node], seconds: dict[Node, float]) -> Region | None:
    inside, views = set(nodes), view_nodes()
    total = sum(seconds.get(n, 0.0) for n in nodes)
    computed = [n for n in nodes if n.target not in views and n.target is not _CAST]
    if total <= 0 or len(nodes) > _MAX_NODES or not computed:
        return None
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    outputs = tuple(n for n in nodes if any(u not in inside for u in n.users))
    if not inputs or not outputs or not all(_is_plain(n) for n in (*inputs, *nodes)):
        return None
    slowest = max(nodes, key=lambda n: seconds.get(n, 0.0))
    return Region(tuple(nodes), inputs, outputs, site_of(slowest), total)


def _trimmed(nodes: Sequence[Node]) -> list[Node]:
    """Without views at the edges: what a kernel reads and writes may lie anywhere."""
    views = view_nodes()
    kept = list(nodes)
    while True:
        inside = set(kept)
        edge = {
            n
            for n in kept
            if n.target in views
            and not (n.target is _SLICE and n.args[1] == -1)
            and (not inside & set(n.all_input_nodes) or not inside & set(n.users))
        }
        if not edge:
            return _without_lone_slices(kept)
        kept = [n for n in kept if n not in edge]


def _without_lone_slices(nodes: list[Node]) -> list[Node]:
    """A slice that is an output by itself computes nothing."""
    inside = set(nodes)
    return [n for n in nodes if n.target is not _SLICE or inside & set(n.users)]


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
            region = replace(known, seconds=known.seconds + region.seconds, count=known.count + 1)
        merged[code] = region
    return sorted(merged.values(), key=lambda r: -r.seconds)
