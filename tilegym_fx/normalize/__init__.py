"""The normal form: one flat list of small named passes, the same for patterns and for models.

The result is still an ordinary, executable ATen graph; every pass keeps the values bit for bit, apart from
``rsqrt``, which may differ in the last place from ``1 / sqrt``, and from the order of a ``topk`` that leaves it open.
``node.meta["origins"]`` tells which exported values a node has.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from .. import settings
from ..errors import InternalError
from . import arithmetic, assembly, casts, cleanup, composites, indexing, inplace, orders, ranges, views
from .aliasing import Writes
from .edit import GraphPass, aten, calls
from .gradients import pin_gradients
from .layouts import pin_layouts
from .products import note_products, pin_products

#: Order matters only where the comment says so; the list runs until nothing changes.
PASSES: tuple[GraphPass, ...] = (
    cleanup.drop_asserts,
    cleanup.default_args,
    cleanup.sizes_of_first,
    cleanup.drop_dropout,
    composites.plain_rms_norm,
    indexing.drop_detach_in_place,
    indexing.plain_indices,  # before drop_copies, which leaves the constant alone
    indexing.puts_into_all,
    inplace.drop_needless_writes,
    assembly.one_cat,
    cleanup.drop_copies,
    cleanup.plain_pads,
    arithmetic.tensor_overloads,
    arithmetic.plain_numbers,
    arithmetic.number_last,
    arithmetic.shifted_arange,
    arithmetic.split_rsub,
    casts.one_cast,
    casts.explicit_promotion,  # after one_cast: it must see which casts are real
    casts.drop_round_trips,
    casts.one_softmax,
    views.dims_from_end,
    views.one_transpose,
    views.splits_to_slices,
    views.plain_slices,
    views.one_reshape,  # after splits_to_slices: an unbind leaves a reshape
    views.plain_expands,
    indexing.whole_puts,
    arithmetic.one_square,
    arithmetic.one_rsqrt,
    arithmetic.one_scaling,
    arithmetic.drop_identities,
    arithmetic.explicit_scale,
    arithmetic.scale_after_views,
    orders.one_inverse,
    orders.sorted_topk,
    ranges.drop_range_guards,
    arithmetic.one_addmm,
    views.linear_keeps_rank,  # after one_addmm: Conv1D flattens rows around addmm
    cleanup.merge_duplicates,
    cleanup.drop_dead,
)

_MAX_ROUNDS = 8
_ERASED = {
    aten.alias.default,
    aten.square.default,
    aten.t.default,
    aten._to_copy.default,
    aten.mul.Scalar,
    aten._assert_tensor_metadata.default,
}


def normalize(graph: Graph) -> int:
    """Bring ``graph`` to the normal form in place.

    Args:
        graph: An ATen graph, not decomposed, whose nodes carry ``meta["val"]``.

    Returns:
        How many edits were made.

    Raises:
        InternalError: With ``TILEGYM_FX_CHECK=1``, if an entry or exit condition of the normal form fails.
    """
    for node in graph.nodes:
        node.meta.setdefault("origins", (node.name,))
    checked = settings.check()
    if checked:
        _require_values(graph, "on entry")
    total = 0
    for _ in range(_MAX_ROUNDS):
        edits = sum(_run(graph_pass, graph, checked) for graph_pass in PASSES)
        total += edits
        if not edits:
            break
    if checked:
        _require_normal(graph)
    return total


def _run(graph_pass: GraphPass, graph: Graph, checked: bool) -> int:
    edits = graph_pass(graph)
    if checked and edits:
        graph.lint()
        _require_values(graph, f"after {graph_pass.__name__}")
    return edits


def _require_values(graph: Graph, when: str) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and _gives_something(node):
            raise InternalError(f"{when}, node {node.name} ({node.target}) has no fake value")


def _gives_something(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.returns)


def _require_normal(graph: Graph) -> None:
    writes = Writes(graph)
    for node in calls(graph, _ERASED):
        if not writes.touched(node) and not any(user.op == "output" for user in node.users):
            raise InternalError(f"node {node.name} ({node.target}) should not be in the normal form")


__all__ = ["PASSES", "normalize", "note_products", "pin_gradients", "pin_layouts", "pin_products"]
