"""Places that write results into the memory of their inputs, as a static cache is updated by ``index_copy_``.

A Definition never writes: it gives the new value. Where an author's code writes that value over the old one, an op that
writes does the same, if nobody can tell that it writes at the end of the region instead of where the author did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from .facts import IN_PLACE
from .normalize.aliasing import Writes

#: A sentence that says why not, made when somebody reads it, and the guilty node.
Reason = tuple[Callable[[], str], Node]


def written_results(inputs: Mapping[str, Any], outputs: Sequence[Node]) -> dict[int, str]:
    """Place of an output -> the input in whose memory it is written."""
    names: dict[Any, str] = {node: name for name, node in inputs.items() if isinstance(node, Node)}
    return {i: names[o.args[0]] for i, o in enumerate(outputs) if o.target in IN_PLACE and o.args[0] in names}


def why_not_written(region: Sequence[Node], inputs: Mapping[str, Any], outputs: Sequence[Node],
                    writes: Writes) -> Reason | None:  # fmt: skip
    """Why the writes of a region cannot be those of one op at its end, or None.

    Args:
        region: Its nodes, in graph order.
        inputs: What it reads and writes.
        outputs: Its results.
        writes: Of the whole graph.
    """
    writers = [outputs[i] for i in written_results(inputs, outputs)]
    if len(writers) < sum(node.target in IN_PLACE for node in region):
        return (lambda: "it writes in place what is no input or no result"), region[-1]
    could = [o for o in outputs if o.target in IN_PLACE.values()]
    if writers and could:
        return (lambda: f"{could[0]} is a new value, and others of its results are written in place"), could[0]
    return next(_seen(region, inputs, writers, writes), None)


def _seen(
    region: Sequence[Node], inputs: Mapping[str, Any], writers: Sequence[Node], writes: Writes
) -> Iterator[Reason]:
    """Who could tell: readers of the same memory in the region, or behind an author's write and before its end.

    The region may read a target before it writes it, as the op does, if nobody writes there in between.
    """
    of_writer = {writer: writes.roots(writer) for writer in writers}
    targets = {writer.args[0] for writer in writers}
    given = [node for node in inputs.values() if isinstance(node, Node)]
    for writer, roots in of_writer.items():
        others = [w for w in writers if w is not writer]
        inner = [n for n in (*given, *region) if n is not writer and n not in targets]
        for node in (*inner, *others):
            if roots & writes.roots(node) or (node in region and _reads_what_changed(node, writer, writes)):
                yield _say(node, writer)
        for node in _between(writer, region[-1]):
            if node not in region and any(roots & writes.roots(n) for n in (node, *node.all_input_nodes)):
                yield _say(node, writer)


def _reads_what_changed(node: Node, writer: Node, writes: Writes) -> bool:
    """Whether a call reads what is written, and that is no more, or not yet, what the writer finds there."""
    target = writer.args[0]
    if not isinstance(target, Node) or target not in node.all_input_nodes:
        return False
    return writes.epoch(target, node) != writes.epoch(target, writer)


def _say(node: Node, writer: Node) -> Reason:
    return (lambda: f"{node} may see that {writer} writes in place before the region ends"), node


def _between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes behind one and before another."""
    node = first.next if first is not last else last
    while node is not last:
        yield node
        node = node.next
