"""Counts, without the matcher's help, the places of a graph where a kernel could be.

A place is known by key nodes: the normalisation of a norm, the products with cosines of a rotary embedding, the
top-k of a router. Which patterns there are has no part in it, so matched places over all places is a fair
share: a place counts as matched when a chosen Match holds every key node of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node

CATEGORIES = (
    "norm", "rotary", "gated MLP", "MLP", "attention", "linears", "MoE router", "experts", "conv", "SSM", "head",
)  # fmt: skip

_LOOK = 12
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "native_layer_norm", "_fused_rms_norm"})
_ROOTS = frozenset({"rsqrt", "sqrt", "linalg_vector_norm"})
_REDUCTIONS = frozenset({"mean", "var", "var_mean", "sum", "linalg_vector_norm", "norm"})
_TRIGONOMETRY = frozenset({"cos", "sin", "polar"})
_TABLES = re.compile(r"(rope|rotary|embed_positions|freqs|(^|_)(sin|cos))")
_LINEARS = frozenset({"linear", "addmm"})
_GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "mm", "einsum"})
_ACTIVATIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh", "mish", "softplus", "hardswish", "leaky_relu"})
#: What leaves the meaning of a value: its form, its dtype, a number times it.
_LOOKS_THROUGH = frozenset({
    "_to_copy", "to", "view", "reshape", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "expand",
    "slice", "select", "split", "split_with_sizes", "chunk", "getitem", "contiguous", "clone", "flatten",
    "unflatten", "dropout", "clamp", "clamp_max", "clamp_min", "add", "mul", "sub", "div", "pow", "neg", "cat",
    "stack", "where", "masked_fill", "index", "movedim", "mean", "amax", "convert_element_type", "tanh", "repeat",
    "repeat_interleave", "constant_pad_nd", "pad", "maximum", "minimum", "type_as", "alias", "max", "masked_fill_",
})  # fmt: skip
_RECURRENT = re.compile(
    r"Mamba|SSM|DeltaNet|DeltaAttention|Lightning|KDA|Kda|Rwkv|RWKV|mLSTM|xLSTMLayer|RecurrentBlock|ShortConv"
)
_INNER = re.compile(r"Norm|Conv1d|Linear|Rotary|Cache")
_MIXED = 0.9


@dataclass(frozen=True)
class Place:
    """One place: its category, and the nodes that a Match must hold to have it."""

    category: str
    keys: frozenset[Node]


def places(graph: Graph, vocabulary: int) -> list[Place]:
    """Every place of a normalised graph.

    Args:
        graph: A captured call of a model, in the normal form.
        vocabulary: Width of the logits, by which the head is known.
    """
    view = _View(graph)
    head = set(_heads(view, vocabulary))
    found = [Place("norm", frozenset({node})) for node in _norms(view)]
    found += _by_module("rotary", _rotations(view))
    gated, plain = _activations(view)
    found += [Place("gated MLP", frozenset({node})) for node in gated]
    found += [Place("MLP", frozenset({node})) for node in plain]
    found += [Place("attention", frozenset({node})) for node in _attentions(view)]
    found += [Place("head" if node in head else "linears", frozenset({node})) for node in view.calls(_LINEARS)]
    found += _by_module("MoE router", _routers(view))
    found += _by_module("experts", _experts(view))
    found += [Place("conv", frozenset({n})) for n in view.calls({"conv1d", "convolution", "conv2d"})]
    return found


def matched(found: Iterable[Place], taken: Collection[Node]) -> dict[str, tuple[int, int]]:
    """Category -> places whose key nodes are all taken, and places; categories without places are left out."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place in found:
        counts[place.category][0] += place.keys <= set(taken)
        counts[place.category][1] += 1
    return {name: (counts[name][0], counts[name][1]) for name in CATEGORIES if name in counts}


def recurrent_blocks(graph: Graph, taken: Collection[Node], seconds: Callable[[Node], float]) -> tuple[int, int] | None:
    """State-space and linear-attention blocks of which a kernel does nearly all but the linears, and all of them."""
    blocks: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node in graph.nodes:
        block = _recurrent_block(node)
        if block is not None and node.op == "call_function" and _name(node) not in _LINEARS:
            time = seconds(node)
            blocks[block][0] += time * (node in taken)
            blocks[block][1] += time
    done = sum(ours >= _MIXED * total for ours, total in blocks.values())
    return (done, len(blocks)) if blocks else None


def _recurrent_block(node: Node) -> str | None:
    for key, (_, kind) in (node.meta.get("nn_module_stack") or {}).items():
        name = (kind if isinstance(kind, str) else kind.__qualname__).rpartition(".")[2]
        if _RECURRENT.search(name) and not _INNER.search(name) and not name.endswith(("Model", "Layer", "ForCausalLM")):
            return str(key)
    return None


class _View:
    """A graph with what the searches share: names of ops, and which values depend on the tokens' embeddings."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.active: set[Node] = set()
        for node in self.nodes:
            begins = _name(node) in {"linear", "embedding", "addmm"} or any(map(_is_cache, node.all_input_nodes))
            if begins or any(source in self.active for source in node.all_input_nodes):
                self.active.add(node)

    def calls(self, names: Collection[str]) -> Iterator[Node]:
        return (node for node in self.nodes if _name(node) in names)


def _is_cache(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim() == 4 and "." not in node.name


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).rpartition(".")[2] if packet is not None else str(getattr(node.target, "__name__", ""))


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return str(list(stack)[-1]) if stack else ""


def _classes(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return " ".join(str(entry[1]) for entry in stack.values())


def _by_module(category: str, keys: Iterable[Node]) -> list[Place]:
    groups: dict[str, set[Node]] = defaultdict(set)
    for node in keys:
        groups[_module(node)].add(node)
    return [Place(category, frozenset(group)) for group in groups.values()]


def _back(node: Node, through: Collection[str] = _LOOKS_THROUGH) -> Iterator[Node]:
    """The nodes that a value is made of, nearest first; past those in ``through``, and no farther than a few."""
    layer, seen = [node], {node}
    for _ in range(_LOOK):
        sources = [s for n in layer for s in n.all_input_nodes if s not in seen]
        seen.update(sources)
        yield from dict.fromkeys(sources)
        layer = [s for s in dict.fromkeys(sources) if _name(s) in through]


def _ahead(node: Node, through: Collection[str] = _LOOKS_THROUGH) -> Iterator[Node]:
    layer, seen = [node], {node}
    for _ in range(_LOOK):
        users = [u for n in layer for u in n.users if u not in seen]
        seen.update(users)
        yield from dict.fromkeys(users)
        layer = [u for u in dict.fromkeys(users) if _name(u) in through]


def _reaches(nodes: Iterable[Node], names: Collection[str]) -> bool:
    return any(_name(node) in names for node in nodes)


def _norms(view: _View) -> Iterator[Node]:
    yield from view.calls(_NORMS)
    near = {"add", "mul", "_to_copy", "to", "clamp", "clamp_min", "view", "reshape", "unsqueeze", "maximum", "div"}
    for node in view.calls(_ROOTS):
        if node not in view.active:
            continue
        if _name(node) == "linalg_vector_norm" or _reaches(_back(node, near), _REDUCTIONS):
            yield node


def _rotations(view: _View) -> Iterator[Node]:
    """Products of an activation with a cosine or a phase."""
    turning = set(view.calls({"cos", "polar"}))
    turning |= {node for node in view.graph.nodes if node.op == "placeholder" and _is_table(node)}
    for node in view.nodes:
        sources = node.all_input_nodes
        if not any(source in turning for source in sources):
            continue
        if node not in view.active:
            turning.add(node)
        elif _name(node) in {"mul", "mm", "matmul"} and any(source in view.active for source in sources):
            yield node


def _is_table(node: Node) -> bool:
    value = _value(node)
    name = str(node.target)
    if value is None or not (value.is_floating_point() or value.is_complex()) or not name.startswith("b_"):
        return False
    return bool(_TABLES.search(name)) and "inv_freq" not in name


def _activations(view: _View) -> tuple[list[Node], list[Node]]:
    """Products that gate one half of a linear's result by the other, and activations between two linears."""
    gated = [node for node in view.calls({"mul"}) if _is_gate(node)]
    used = {source for node in gated for source in _back(node) if _name(source) in _ACTIVATIONS}
    plain = [
        node for node in view.calls(_ACTIVATIONS - {"sigmoid", "softplus"})
        if node not in used and _reaches(_back(node), _LINEARS) and _is_between(node)
    ]  # fmt: skip
    return gated, plain


def _is_between(node: Node) -> bool:
    """Whether a value of an activation is what a linear reads next, and the linear before it widened."""
    before = next((n for n in _back(node) if _name(n) in _LINEARS), None)
    after = next((n for n in _ahead(node) if _name(n) in _LINEARS), None)
    if before is None or after is None:
        return False
    wide, narrow = _value(before), _value(after)
    read = _value(after.args[0])
    return wide is not None and narrow is not None and read is not None and wide.shape[-1] == read.shape[-1]


def _is_gate(node: Node) -> bool:
    operands = [argument for argument in node.args if isinstance(argument, Node)]
    if len(operands) != 2 or not _reaches(_ahead(node, _LOOKS_THROUGH - {"add", "mul"}), _LINEARS):
        return False
    narrow = _LOOKS_THROUGH - {"cat", "stack", "mean", "where", "index"}
    first, second = ([operand, *_back(operand, narrow)] for operand in operands)
    for side, other in ((first, second), (second, first)):
        act = next((n for n in side if _name(n) in _ACTIVATIONS), None)
        roots = [_linear_root(side), _linear_root(other)]
        if act is None or None in roots or _reaches(other, _ACTIVATIONS):
            continue
        if roots[0] is not roots[1] or _is_a_part(other):
            return True
    return False


def _linear_root(nodes: Iterable[Node]) -> Node | None:
    """The linear whose result a value is, if no other product comes first."""
    stops = _LINEARS | _GROUPED | _PRODUCTS | {"scaled_dot_product_attention", "conv1d", *_NORMS, "rsqrt", "softmax"}
    root = next((node for node in nodes if _name(node) in stops), None)
    return root if root is not None and _name(root) in _LINEARS else None


def _is_a_part(nodes: Iterable[Node]) -> bool:
    return _reaches(nodes, {"slice", "select", "split", "chunk", "split_with_sizes", "getitem"})


def _attentions(view: _View) -> Iterator[Node]:
    yield from view.calls({"scaled_dot_product_attention"})
    for node in view.calls({"softmax", "_softmax", "_safe_softmax"}):
        if _reaches(_back(node), _PRODUCTS) and _reaches(_ahead(node), _PRODUCTS):
            yield node


def _heads(view: _View, vocabulary: int) -> Iterator[Node]:
    output = next(iter(reversed(view.graph.nodes)))
    for node in chain(output.all_input_nodes, *(_back(result) for result in output.all_input_nodes)):
        value = _value(node)
        if _name(node) in _LINEARS and value is not None and value.shape[-1] == vocabulary:
            yield node


def _routers(view: _View) -> Iterator[Node]:
    for node in view.calls({"topk"}):
        classes = _classes(node)
        if "Indexer" not in classes and re.search(r"Router|Gate|Gating|Moe|MoE|MOE|TopK|FFN|Experts", classes):
            yield node


def _experts(view: _View) -> Iterator[Node]:
    """Products with the stacked weights of several experts."""
    yield from view.calls(_GROUPED)
    for node in view.calls({"bmm", "matmul", "baddbmm"}):
        for source in node.all_input_nodes:
            origin = source
            while _name(origin) in {"transpose", "permute", "view", "reshape", "_to_copy", "to"}:
                origin = origin.all_input_nodes[0]
            value = _value(origin)
            is_parameter = origin.op == "placeholder" and str(origin.target).startswith("p_")
            if is_parameter and value is not None and value.dim() == 3:
                yield node
                break
