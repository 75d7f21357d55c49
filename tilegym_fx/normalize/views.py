"""Passes that bring views to one form: reshape, slice, transpose, with dims counted from the end."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from .aliasing import Writes
from .edit import (
    args_of,
    aten,
    calls,
    fake_call,
    insert,
    is_tensor,
    replace,
    same_size,
    shape_key,
    size_args,
    take_over,
    val,
)

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten.view_as.default,
    aten.reshape_as.default,
}
_SPLITS = {
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
}
_SIZED = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_DIM_NAMES = {"dim", "dim0", "dim1", "dims"}
#: Operations of ATen whose ``dim`` and ``dims`` are those of their first tensor. Of others not all are: `unsqueeze_`
#: has changed the tensor when it is looked at, `diag_embed` speaks of its result, `cosine_similarity` of what both
#: broadcast to, and the repeats of `tile` are called ``dims``.
_OF_FIRST = frozenset({
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort", "chunk", "count_nonzero", "cummax",
    "cummin", "cumprod", "cumsum", "cumsum_", "diagonal", "diff", "flip", "frobenius_norm", "gather", "glu",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce",
    "index_select", "kthvalue", "linalg_vector_norm", "log_softmax", "_log_softmax", "logcumsumexp", "logsumexp",
    "max", "mean", "median", "min", "mode", "nanmean", "nanmedian", "nansum", "narrow", "norm", "permute", "prod",
    "repeat_interleave", "roll", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_", "select", "select_scatter", "size", "slice", "slice_scatter", "softmax", "_softmax",
    "_safe_softmax", "sort", "special_log_softmax", "special_softmax", "split", "split_with_sizes", "squeeze", "std",
    "std_mean", "stride", "sum", "swapdims", "sym_size", "sym_stride", "tensor_split", "topk", "transpose", "unbind",
    "unflatten", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "var", "var_mean",
})  # fmt: skip
#: Those whose result has one more.
_GROWS = frozenset({"unsqueeze", "stack"})
#: Those of several tensors, which count only if these have equally many.
_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})


def dims_from_end(graph: Graph) -> int:
    """Count every ``dim`` and ``dims`` argument from the end, so that leading dimensions do not matter."""
    changed = 0
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not node.args:
            continue
        rank = _rank(node)
        if rank is None:
            continue
        args = tuple(
            _negative(value, rank) if schema.arguments[i].name in _DIM_NAMES else value
            for i, value in enumerate(node.args)
        )
        if args != node.args:
            node.args, changed = args, changed + 1
    return changed


def _rank(node: Node) -> int | None:
    """How many dimensions a node's ``dim`` counts among; None where that is not known."""
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    if namespace != "aten" or name not in _OF_FIRST | _GROWS | _JOINS:
        return None
    first = node.args[0]
    tensors = [t for t in (first if isinstance(first, list | tuple) else (first,)) if isinstance(t, Node)]
    if not all(is_tensor(val(tensor)) for tensor in tensors):
        return None
    ranks = {val(tensor).dim() for tensor in tensors}
    return ranks.pop() + (name in _GROWS) if len(ranks) == 1 else None


def _negative(value: Any, rank: int) -> Any:
    if isinstance(value, list | tuple):
        return [_negative(v, rank) for v in value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and rank:
        return value - rank
    return value


def one_transpose(graph: Graph) -> int:
    """``t``, ``permute`` and ``swapaxes`` of two dims become ``transpose``, the later first; two cancel.

    A ``permute`` that is one swap and then one of the last two dims becomes these two.
    """
    changed = 0
    forms = {
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.numpy_T.default,
        aten.swapaxes.default,
    }
    for node in calls(graph, forms):
        dims = _swapped(node)
        source = args_of(node)[0]
        if dims is not None and source.target is aten.transpose.int and source.args[1:] == dims:
            take_over(node, source.args[0])
            changed += 1
        elif dims is not None and (node.target is not aten.transpose.int or node.args[1:] != dims):
            replace(node, aten.transpose.int, (node.args[0], *dims))
            changed += 1
        elif dims is None and node.target is aten.permute.default and (first := _first_swap(node)) is not None:
            once = insert(node, aten.permute.default, (source, first), fake_call(aten.permute.default, (source, first)))
            replace(node, aten.transpose.int, (once, -1, -2))
            changed += 1
    return changed


def _first_swap(node: Node) -> list[int] | None:
    """The order before the last two dims are swapped, if that swaps two dims alone."""
    rank = val(node).dim()
    order = [d % rank for d in args_of(node)[1]]
    first = [*order[:-2], *order[:-3:-1]]
    return first if sum(i != d for i, d in enumerate(first)) == 2 else None


def _swapped(node: Node) -> tuple[int, int] | None:
    rank = val(node).dim()
    if node.target in (aten.t.default, aten.numpy_T.default):
        return (-1, -2) if rank == 2 else None
    if node.target is aten.permute.default:
        order = [d % rank for d in args_of(node)[1]]
        moved = [i for i, d in enumerate(order) if i != d]
        return (moved[1] - rank, moved[0] - rank) if len(moved) == 2 else None
    low, high = sorted(d if d < 0 else d - rank for d in args_of(node)[1:3])
    return high, low


def splits_to_slices(graph: Graph) -> int:
    """``chunk``/``split``/``unbind`` + getitem, ``select`` and ``narrow`` become ``slice`` (+ reshape)."""
    changed = 0
    for node in calls(graph, {operator.getitem}):
        parts = node.args[0]
        if isinstance(parts, Node) and parts.target in _SPLITS and isinstance(node.args[1], int):
            changed += _slice_part(node, parts, node.args[1])
    for node in calls(graph, {aten.select.int, aten.narrow.default}):
        changed += _slice_select(node)
    return changed


def _slice_part(node: Node, parts: Node, index: int) -> int:
    source, dim = args_of(parts)[0], _split_dim(parts)
    sizes = [1 if parts.target is aten.unbind.int else p.shape[dim] for p in val(parts)]
    if not all(isinstance(s, int) for s in sizes):
        return 0
    index %= len(sizes)
    start = sum(sizes[:index])
    _to_slice(node, source, dim, start, start + sizes[index])
    return 1


def _split_dim(parts: Node) -> Any:
    position = 1 if parts.target is aten.unbind.int else 2
    args: dict[int, Any] = dict(enumerate(parts.args))
    dim: Any = args.get(position, parts.kwargs.get("dim", 0))
    rank = val(args[0]).dim()
    return dim if dim < 0 else dim - rank


def _slice_select(node: Node) -> int:
    source, dim, start = args_of(node)[:3]
    rank = val(source).dim()
    dim = dim if dim < 0 else dim - rank
    size = val(source).shape[dim]
    length = args_of(node)[3] if node.target is aten.narrow.default else 1
    if not all(isinstance(v, int) for v in (start, size, length)):
        return 0
    start %= size
    _to_slice(node, source, dim, start, start + length)
    return 1


def _to_slice(node: Node, source: Node, dim: int, start: int, end: int) -> None:
    args = (source, dim, start, end)
    value = fake_call(aten.slice.Tensor, args)
    part = insert(node, aten.slice.Tensor, args, value)
    if shape_key(value.shape) == shape_key(val(node).shape):
        take_over(node, part)
        return
    sizes = size_args(node, val(node).shape, part)
    if sizes is None:  # several symbolic sizes and no way to name them: keep the author's call
        node.graph.erase_node(part)
    else:
        replace(node, aten.reshape.default, (part, sizes))


def plain_slices(graph: Graph) -> int:
    """Slices get explicit non-negative bounds; a slice of everything goes; slice of slice becomes one."""
    changed = 0
    writes = Writes(graph)
    for node in calls(graph, {aten.slice.Tensor}):
        source, dim, start, end, step = _slice_args(node)
        size = val(source).shape[dim]
        if writes.touched(node) or isinstance(start, Node) or isinstance(end, Node):
            continue
        if not isinstance(size, int):
            if start == 0 and end >= 2**62 and step == 1:
                take_over(node, source)
                changed += 1
            continue
        start, end = (max(0, min(v + size if v < 0 else v, size)) for v in (start, end))
        if (start, end, step) == (0, size, 1):
            take_over(node, source)
            changed += 1
        elif node.args[1:] != (dim, start, end) + ((step,) if step != 1 else ()):
            node.args = (source, dim, start, end) + ((step,) if step != 1 else ())
            changed += 1
    return changed


def _slice_args(node: Node) -> tuple[Node, int, Any, Any, int]:
    source, dim, start, end, step = (*args_of(node), *(0, 0, None, None, 1)[len(node.args) :])[:5]
    dim = dim if dim < 0 else dim - val(source).dim()
    return source, dim, 0 if start is None else start, 2**63 - 1 if end is None else end, step


def one_reshape(graph: Graph) -> int:
    """Every member of the view family becomes ``reshape`` of the first value of its chain; no-op ones go."""
    writes = Writes(graph)
    changed = 0
    for node in calls(graph, RESHAPES):
        if writes.touched(node):
            continue
        source = args_of(node)[0]
        while isinstance(source, Node) and source.target in RESHAPES:
            source = source.args[0]
        changed += _reshape(node, source)
    return changed


def _reshape(node: Node, source: Node) -> int:
    shape = val(node).shape
    if shape_key(val(source).shape) == shape_key(shape):
        if any(u.op == "output" for u in node.users) and source.op == "placeholder":
            return 0
        take_over(node, source)
        return 1
    if node.target is aten.reshape.default and source is node.args[0] and not _has_wildcard(node, shape):
        return 0
    sizes = size_args(node, shape, source)
    if sizes is None and node.target in _SIZED:
        sizes = list(args_of(node)[1])
    if sizes is None or (
        node.target is aten.reshape.default and list(args_of(node)[1]) == sizes and node.args[0] is source
    ):
        return 0
    replace(node, aten.reshape.default, (source, sizes))
    return 1


def _has_wildcard(node: Node, shape: Any) -> bool:
    return -1 in [s for s in args_of(node)[1] if isinstance(s, int)] and all(isinstance(s, int) for s in shape)


def plain_expands(graph: Graph) -> int:
    """``expand`` gets its full size; one that changes nothing goes."""
    changed = 0
    writes = Writes(graph)
    for node in calls(graph, {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}):
        source, shape = args_of(node)[0], val(node).shape
        if writes.touched(node):
            continue
        if shape_key(val(source).shape) == shape_key(shape):
            take_over(node, source)
            changed += 1
        elif all(isinstance(s, int) for s in shape) and (
            node.target is not aten.expand.default or list(args_of(node)[1]) != list(shape)
        ):
            replace(node, aten.expand.default, (source, list(shape)))
            changed += 1
    return changed


def linear_keeps_rank(graph: Graph) -> int:
    """``linear`` on flattened rows, reshaped back, becomes ``linear`` on the unflattened value."""
    changed = 0
    for node in calls(graph, {aten.linear.default}):
        flat = node.args[0]
        if not isinstance(flat, Node) or flat.target is not aten.reshape.default or len(node.users) != 1:
            continue
        source, back = args_of(flat)[0], next(iter(node.users))
        rows = (source, flat), (node, back)
        if back.target is aten.reshape.default and _same_leading(source, back) and all(_same_last(*r) for r in rows):
            value = val(back)
            new = insert(node, aten.linear.default, (source, *node.args[1:]), value, like=node)
            take_over(back, new)
            node.graph.erase_node(node)
            changed += 1
    return changed


def _same_leading(source: Node, back: Node) -> bool:
    a, b = val(source).shape, val(back).shape
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a[:-1], b[:-1], strict=True))


def _same_last(one: Node, two: Node) -> bool:
    """Whether a reshape leaves rows whole: heads that are put together and taken apart again are no rows."""
    return same_size(val(one).shape[-1], val(two).shape[-1])


def view_nodes() -> set[Any]:
    """Targets that read no memory and write none, in the normal form."""
    return {*RESHAPES, aten.slice.Tensor, aten.transpose.int, aten.permute.default, aten.expand.default}
