"""The vocabulary: aten operations on single elements, and what each looks like in a cuTile kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

Word = Callable[..., str]


def number(value: Any) -> str:
    """A literal as kernel text."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, float) and math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if isinstance(value, float) and math.isnan(value):
        return "NAN"
    return repr(float(value)) if isinstance(value, float) else repr(value)


def _sum(sign: str) -> Word:
    def write(a: str, b: str, alpha: Any = 1) -> str:
        return f"{a} {sign} {b}" if alpha == 1 else f"{a} {sign} {number(alpha)} * {b}"

    return write


def _power(a: str, exponent: Any) -> str:
    known = {
        2: f"{a} * {a}",
        3: f"{a} * {a} * {a}",
        0.5: f"ct.sqrt({a})",
        -0.5: f"ct.rsqrt({a})",
        -1: f"1.0 / {a}",
        1: a,
    }
    return known.get(exponent) or f"ct.pow({a}, {number(exponent)})"


def _gelu(a: str, approximate: str = "none") -> str:
    return f"tanh_gelu_of({a})" if approximate == "tanh" else f"gelu_of({a})"


def _clamp(a: str, low: Any = None, high: Any = None) -> str:
    text = a if low is None else f"ct.maximum({a}, {number(low) if not isinstance(low, str) else low})"
    return text if high is None else f"ct.minimum({text}, {number(high) if not isinstance(high, str) else high})"


def _softplus(a: str, beta: Any = 1, threshold: Any = 20) -> str:
    scaled = a if beta == 1 else f"{a} * {number(float(beta))}"
    grown = f"ct.log(1.0 + ct.exp({scaled}))"
    grown = grown if beta == 1 else f"{grown} / {number(float(beta))}"
    return f"ct.where({scaled} > {number(float(threshold))}, {a}, {grown})"


def _infix(sign: str) -> Word:
    return lambda a, b: f"{a} {sign} {b}"


def _call(name: str) -> Word:
    return lambda *operands: f"ct.{name}({', '.join(operands)})"


def _each(word: Word, *names: str) -> dict[Any, Word]:
    """The word for every overload of these operations that exists."""
    packets = [getattr(aten, name) for name in names]
    return {getattr(packet, overload): word for packet in packets for overload in packet.overloads()}


#: Operation -> its text, of operands that are float32 (or what they were, for comparisons and integers).
WORDS: dict[Any, Word] = {
    **_each(_sum("+"), "add"),
    **_each(_sum("-"), "sub"),
    **_each(_infix("*"), "mul"),
    aten.div.Tensor: _infix("/"),
    aten.div.Scalar: _infix("/"),
    aten.rsub.Scalar: lambda a, b, alpha=1: f"{b} - {a}",
    aten.neg.default: lambda a: f"-{a}",
    aten.abs.default: _call("abs"),
    aten.exp.default: _call("exp"),
    aten.exp2.default: _call("exp2"),
    aten.log.default: _call("log"),
    aten.log2.default: _call("log2"),
    aten.sqrt.default: _call("sqrt"),
    aten.rsqrt.default: _call("rsqrt"),
    aten.reciprocal.default: lambda a: f"1.0 / {a}",
    aten.sin.default: _call("sin"),
    aten.cos.default: _call("cos"),
    aten.tanh.default: _call("tanh"),
    aten.sigmoid.default: lambda a: f"1.0 / (1.0 + ct.exp(-{a}))",
    aten.silu.default: lambda a: f"{a} / (1.0 + ct.exp(-{a}))",
    aten.gelu.default: _gelu,
    aten.relu.default: lambda a: f"ct.maximum({a}, 0.0)",
    aten.softplus.default: _softplus,
    aten.square.default: lambda a: f"{a} * {a}",
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, high: _clamp(a, None, high),
    aten.maximum.default: _call("maximum"),
    aten.minimum.default: _call("minimum"),
    aten.where.self: _call("where"),
    aten.where.ScalarSelf: _call("where"),
    aten.where.ScalarOther: _call("where"),
    aten.masked_fill.Scalar: lambda a, mask, value: f"ct.where({mask}, {value}, {a})",
    **_each(_infix("<"), "lt"),
    **_each(_infix("<="), "le"),
    **_each(_infix(">"), "gt"),
    **_each(_infix(">="), "ge"),
    aten.eq.Tensor: _infix("=="),
    aten.eq.Scalar: _infix("=="),
    aten.ne.Tensor: _infix("!="),
    aten.ne.Scalar: _infix("!="),
    aten.bitwise_and.Tensor: _infix("&"),
    aten.__and__.Tensor: _infix("&"),
    aten.__or__.Tensor: _infix("|"),
    aten.logical_and.default: _infix("&"),
    aten.bitwise_or.Tensor: _infix("|"),
    aten.logical_or.default: _infix("|"),
    aten.logical_not.default: lambda a: f"~{a}",
    aten.bitwise_not.default: lambda a: f"~{a}",
    aten.to.dtype: lambda a: a,
}
#: Arguments of an operation that choose how it is written instead of being operands.
LITERAL_ARGUMENTS = {
    aten.gelu.default: ("approximate",),
    aten.softplus.default: (1, 2),
    aten.pow.Tensor_Scalar: (1,),
    aten.clamp.default: (1, 2),
    aten.clamp_min.default: (1,),
    aten.clamp_max.default: (1,),
    **dict.fromkeys(_each(_infix("+"), "add", "sub"), ("alpha",)),
    aten.rsub.Scalar: ("alpha",),
}
#: Operations that give a bool, and take operands as they are.
_TRUTHS = (
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "logical_and",
    "logical_or",
    "logical_not",
    "bitwise_and",
    "__and__",
    "__or__",
)
COMPARISONS = frozenset(
    target for target in WORDS if str(target).split(".")[1] in (*_TRUTHS, "bitwise_or", "bitwise_not")
)
#: Natively exact in 16 bits: one rounding, as in float32 and back.
NATIVE = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor})

REDUCTIONS: dict[Any, str] = {
    aten.mean.dim: "mean",
    aten.sum.dim_IntList: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
}
#: Operations that are written as several.
COMPOSITES = frozenset({aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.layer_norm.default})
#: Operations that only say where values are.
PLACES = frozenset({aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.cat.default, aten.transpose.int})

#: Helper -> its text in a kernel file. A helper may use those above it.
HELPERS = {
    "tanh_gelu_of": '''\
def tanh_gelu_of(x):
    """0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), with no difference of nearly equal numbers."""
    twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + ct.exp(-twice))
''',
    "gelu_of": '''\
def gelu_of(x):
    """max(x, 0) - |x| Phi(-|x|); the tail Phi(-a) as exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.3 a)."""
    size = ct.abs(x)
    t = 1.0 / (1.0 + 0.3 * size)
    series = TAIL[0]
    for coefficient in ct.static_iter(TAIL[1:]):
        series = series * t + coefficient
    return ct.maximum(x, 0.0) - size * ct.exp(-0.5 * size * size) * t * series
''',
}
HELPER_CONSTANTS = {
    "gelu_of": """\
#: Coefficients of P, highest power first.
TAIL = (
    0.03567484410792854, -0.15720335906313818, 0.2063539482841781, -0.05368401305839104,
    0.12856179900448342, 0.09991344727377267, 0.12075396200097527, 0.11962929849781213,
)  # fmt: skip
"""
}


def can_write(node: Node) -> bool:
    """Whether a call's operation is in the vocabulary; what stands around it may still prevent a kernel."""
    if node.target in WORDS:
        return _is_number_op(node)
    if node.target in REDUCTIONS or node.target in COMPOSITES:
        return _is_along_rows(node)
    return node.target in PLACES and _keeps_rows(node)


def _keeps_rows(node: Node) -> bool:
    """Whether a view leaves rows what they are: it is of columns, or of the dimensions before them."""
    if node.target is aten.transpose.int:
        return -1 not in node.args[1:3]
    if node.target is aten.slice.Tensor:
        return bool(node.args[1] == -1 and len(node.args) == 4 and _last(node) != 1)
    if node.target is aten.cat.default:
        return bool(len(node.args) > 1 and node.args[1] == -1)
    if node.target is aten.reshape.default:
        before, after = _last(node.args[0]), _last(node)
        return before == after or before == 1 or (after == 1 and _drops_columns(node.args[0]))
    return True


def _last(node: Any) -> int | None:
    shape = node.meta["val"].shape
    return int(shape[-1]) if len(shape) and isinstance(shape[-1], int) else None


def _drops_columns(node: Any) -> bool:
    """Whether a value is a reduction without its last dimension."""
    return node.target in REDUCTIONS and len(node.meta["val"].shape) < len(node.args[0].meta["val"].shape)


def _is_number_op(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype in (torch.float64, torch.complex64):
        return False
    if "logical" not in str(node.target):
        return True
    return all(source.meta["val"].dtype == torch.bool for source in node.all_input_nodes)


def _is_along_rows(node: Node) -> bool:
    """Whether a reduction is over the last dimension alone, counted from the end as in the normal form."""
    if node.target is aten.layer_norm.default:
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    dims = node.args[1] if len(node.args) > 1 else None
    return dims == -1 if isinstance(dims, int) else isinstance(dims, list | tuple) and list(dims) == [-1]
