"""What an operation costs on a named GPU: the bytes it moves, its arithmetic, and the roofline time of both.

Every operation counts as one kernel of its own, as in eager mode, and a fused region as one kernel. The time
of a kernel is the larger of its memory and its arithmetic time, plus what starting it takes. Only ratios of
these times are meant to be trusted. Graphs are expected in the normal form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilegym_fx.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Device:
    """A GPU as a roofline.

    Attributes:
        name: Its name on the command line.
        arch: Its architecture as Solutions spell it.
        bytes_per_second: Of its memory.
        half_flops: Dense bfloat16 and float16 matrix operations a second, float32 accumulation.
        float32_flops: Float32 operations a second, without tensor cores.
        source: What the figures are.
        launch_seconds: What a kernel takes however little it does.
    """

    name: str
    arch: str
    bytes_per_second: float
    half_flops: float
    float32_flops: float
    source: str
    launch_seconds: float = 2e-6


#: Data sheets give peaks; the memory and matrix rates of the H200 are what a copy and a large product reach.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "h200",
            "SM90",
            4.254e12,
            790e12,
            67e12,
            "measured copy and bf16 matmul; fp32 of the SXM data sheet",
        ),
        Device("h100", "SM90", 3.35e12, 989e12, 67e12, "NVIDIA H100 SXM5 80 GB data sheet, without sparsity"),
        Device("b200", "SM100", 8.0e12, 2250e12, 75e12, "NVIDIA HGX B200 data sheet, one GPU, without sparsity"),
        Device("a100", "SM80", 2.039e12, 312e12, 19.5e12, "NVIDIA A100 SXM4 80 GB data sheet, without sparsity"),
        Device("l40s", "SM89", 0.864e12, 362e12, 91.6e12, "NVIDIA L40S data sheet, without sparsity"),
        Device("rtx4090", "SM89", 1.008e12, 165.2e12, 82.6e12, "NVIDIA Ada architecture paper, fp32 accumulation"),
        Device("rtx5090", "SM120", 1.792e12, 209.5e12, 104.8e12, "NVIDIA RTX Blackwell paper, fp32 accumulation"),
    )
}
DEFAULT_DEVICE = "h200"


def get_device(name: str) -> Device:
    """The device of that name, whatever its case and spacing (``RTX 4090``).

    Raises:
        UsageError: There is none; the message lists those there are.
    """
    key = _key(name)
    if key in DEVICES:
        return DEVICES[key]
    raise UsageError(f"unknown device {name!r}", advice=f"Give one of {', '.join(DEVICES)}{did_you_mean(key, DEVICES)}")


def device_of(device: torch.device | None) -> Device:
    """The entry for a CUDA device of this machine, or the nearest of its kind; the default without one."""
    if device is None or device.type != "cuda":
        return DEVICES[DEFAULT_DEVICE]
    key = _key(torch.cuda.get_device_name(device))
    named = next((known for name, known in DEVICES.items() if name in key), None)
    if named is not None:
        return named
    major, minor = torch.cuda.get_device_capability(device)
    return _unlisted(key, 10 * major + minor)


def _unlisted(name: str, capability: int) -> Device:
    """A device that the table lacks: the figures of the listed one that is nearest in architecture."""
    nearest = min(DEVICES.values(), key=lambda known: abs(int(known.arch[2:]) - capability))
    return replace(nearest, name=name, arch=f"SM{capability}", source=f"unlisted: the figures of {nearest.name}")


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


def node_seconds(node: Node, device: Device) -> float:
    """Estimated time of one node as a kernel of its own; 0 for inputs, views and what only reads sizes."""
    if _is_free(node):
        return 0.0
    op = _op(node.target)
    if op.written is not None:
        moved = 2.0 * _bytes(_value(node.args[op.written]))
    else:
        moved = sum(size for _, size in _reads(node)) + _bytes(node.meta.get("val"))
    return _kernel_seconds(moved, _arithmetic_seconds(node, device), device)


def region_seconds(inputs: Iterable[Any], outputs: Iterable[Node], nodes: Collection[Node], device: Device) -> float:
    """Estimated time of one kernel for a region: it reads each input once and writes the outputs alone.

    Args:
        inputs: What the kernel reads; what is no node, such as a literal, costs nothing.
        outputs: What it writes.
        nodes: What it computes, for the arithmetic and to know which rows of its inputs it reads.
        device: Where.
    """
    read: dict[Node, float] = {}
    for node in nodes:
        if not _is_free(node):
            for source, size in _reads(node):
                read[source] = max(read.get(source, 0.0), size)
    distinct = dict.fromkeys(node for node in inputs if isinstance(node, Node))
    of_input: dict[Node, float] = {}
    for source, size in read.items():
        root = _viewed(source, distinct)
        of_input[root] = of_input.get(root, 0.0) + size
    moved = sum(min(of_input.get(node, math.inf), _bytes(_value(node))) for node in distinct)
    moved += sum(map(_written_bytes, dict.fromkeys(outputs)))
    return _kernel_seconds(moved, sum(_arithmetic_seconds(node, device) for node in nodes), device)


def _viewed(source: Node, inputs: Collection[Node]) -> Node:
    """The input of a region of which a value is a view, or the value itself."""
    while source not in inputs and source.op == "call_function" and _is_free(source):
        parents = source.all_input_nodes
        if len(parents) != 1:
            break
        source = parents[0]
    return source


def _kernel_seconds(moved: float, arithmetic: float, device: Device) -> float:
    return device.launch_seconds + max(moved / device.bytes_per_second, arithmetic)


@dataclass(frozen=True)
class _Op:
    """What the model knows of an operation.

    Attributes:
        free: It starts no kernel.
        may_copy: Declared as a view, it copies where the dtype or the layout changes.
        reads_rows: It reads of its first operand only what it returns.
        grouped: Its second operand holds a matrix per expert.
        written: It writes into an existing tensor: index of the argument with what it writes.
        flops: How to count its arithmetic.
    """

    free: bool
    may_copy: bool = False
    reads_rows: bool = False
    grouped: bool = False
    written: int | None = None
    flops: Callable[[Node], float] | None = None


@cache
def _op(target: Any) -> _Op:
    schema = getattr(target, "_schema", None)
    if schema is None:
        return _Op(free=not isinstance(target, torch._ops.HigherOrderOperator))
    namespace, _, name = schema.name.partition("::")
    if not schema.returns or name.startswith("sym_") or name in _NO_KERNEL:
        return _Op(free=True)
    may_copy = namespace == "aten" and name in _MAY_COPY
    return _Op(
        free=not may_copy and all(_is_view(result) for result in schema.returns),
        may_copy=may_copy,
        reads_rows=name in _READS_ROWS,
        grouped=name in _GROUPED,
        written=_WRITES.get(name),
        flops=_FLOPS.get(name),
    )


_NO_KERNEL = frozenset({"item", "_local_scalar_dense", "lift_fresh_copy", "_unsafe_view", "detach_", "requires_grad_"})
_MAY_COPY = frozenset({"to", "contiguous"})
_READS_ROWS = frozenset({"embedding", "index", "index_select", "gather", "take_along_dim"})
_WRITES = {"copy_": 1, "index_put_": 2, "index_copy_": 3, "index_add_": 3, "scatter_": 3, "scatter_add_": 3}
_GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})


def _is_view(result: Any) -> bool:
    alias = result.alias_info
    return alias is not None and not alias.is_write


def _is_free(node: Node) -> bool:
    if node.op != "call_function":
        return True
    op = _op(node.target)
    return op.free or (op.may_copy and _is_same(_value(node.args[0]), _value(node)))


def _is_same(before: Any, after: Any) -> bool:
    """Whether a cast or a change of layout gives back its input."""
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return True
    strides = [[_size(stride) for stride in value.stride()] for value in (before, after)]
    return before.dtype == after.dtype and strides[0] == strides[1]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _size(value: Any) -> int:
    """A size as a number: of a symbol the hint that it was traced with, 1 where there is none."""
    if isinstance(value, int):
        return value
    hint = value.node.hint
    return int(hint) if hint is not None else 1


def _shape(value: torch.Tensor) -> list[int]:
    return [_size(size) for size in value.shape]


def _bytes(value: Any) -> float:
    """Bytes of a tensor in memory, expanded dimensions counted once; of several tensors, their sum."""
    if isinstance(value, torch.Tensor):
        sizes = zip(value.shape, value.stride(), strict=True)
        stored = prod(_size(size) for size, stride in sizes if not (isinstance(stride, int) and stride == 0))
        return float(stored * value.dtype.itemsize)
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0.0


def _written_bytes(node: Node) -> float:
    """What a kernel writes: its result, or what it puts into an existing tensor."""
    written = _op(node.target).written if node.op == "call_function" else None
    return _bytes(_value(node) if written is None else _value(node.args[written]))


def _reads(node: Node) -> Iterator[tuple[Node, float]]:
    """Each tensor that a kernel reads, with how many bytes of it."""
    op = _op(node.target)
    for i, source in enumerate(node.all_input_nodes):
        size = _bytes(_value(source))
        if i == 0 and op.written is not None:
            size = 0.0
        elif i == 0 and op.reads_rows:
            size = min(size, _bytes(_value(node)))
        elif i == 1 and op.grouped:
            size *= _share_of_experts(node)
        yield source, size


def _share_of_experts(node: Node) -> float:
    """How much of the experts' weights a grouped product can read: each row goes to one expert."""
    rows, experts = _shape(_value(node.args[0]))[0], _shape(_value(node.args[1]))[0]
    return min(1.0, rows / max(experts, 1))


def _arithmetic_seconds(node: Node, device: Device) -> float:
    """Time of a node's matrix products at the rate for their dtype; all other arithmetic is hidden."""
    count = _op(node.target).flops if node.op == "call_function" else None
    if count is None:
        return 0.0
    itemsize = _value(node).dtype.itemsize
    return count(node) / (device.half_flops if itemsize <= 2 else device.float32_flops)


def _product(node: Node) -> float:
    return 2.0 * prod(_shape(_value(node))) * _shape(_value(node.args[0]))[-1]


def _product_and_bias(node: Node) -> float:
    return 2.0 * prod(_shape(_value(node))) * _shape(_value(node.args[1]))[-1]


def _convolution(node: Node) -> float:
    return 2.0 * prod(_shape(_value(node))) * prod(_shape(_value(node.args[1]))[1:])


def _attention(node: Node) -> float:
    """Both products of attention; under a causal mask half of them."""
    query, key, value = (_shape(_value(arg)) for arg in node.args[:3])
    flops = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
    return flops / 2 if causal else flops


_FLOPS: dict[str, Callable[[Node], float]] = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul", *_GROUPED), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _product_and_bias),
    **dict.fromkeys(("convolution", "conv1d", "conv2d"), _convolution),
    "scaled_dot_product_attention": _attention,
}
