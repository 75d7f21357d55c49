"""Probes: sizes, dtypes and numbers at which a Definition's functions are traced to find out what they are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import PatternError

if TYPE_CHECKING:
    from .schema import Definition, TensorSpec

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bool": torch.bool,
    "int64": torch.int64,
    "int32": torch.int32,
    "complex64": torch.complex64,
}
_HALVES = ("bfloat16", "float16")
#: What cosines and sines are called in every Definition that has them.
_TABLES = ("cos", "sin")


@dataclass(frozen=True)
class Probe:
    """Dtypes and sizes to trace at.

    Attributes:
        dtype: Of what a Definition declares in 16 bits.
        wide_weights: Vectors and a bias are float32 all the same, as norm weights may be.
        equal: Axes of which one divides the other have the same size: there are no groups, or a batch of one.
        tables: Dtype of cosines and sines whatever is declared: a model may keep them wider or narrower.
        case: Which part of a constraint `A or B` holds, counted from 0.
    """

    dtype: torch.dtype
    wide_weights: bool = False
    equal: bool = False
    tables: torch.dtype | None = None
    case: int = 0

    def inputs(self, definition: Definition) -> dict[str, Any]:
        """Tensors on ``meta``, and numbers that are no size and no constant that anybody writes."""
        axes = probe_axes(definition, equal=self.equal, case=self.case)
        inputs: dict[str, Any] = {}
        for position, (name, spec) in enumerate(definition.inputs.items()):
            if spec.shape is None:
                inputs[name] = _number(spec, position)
            else:
                shape = [axes[a] for a in spec.shape]
                inputs[name] = torch.empty(shape, dtype=self._dtype(name, spec), device="meta")
        return inputs

    def _dtype(self, name: str, spec: TensorSpec) -> torch.dtype:
        if self.tables is not None and name in _TABLES:
            return self.tables
        if spec.dtype not in _HALVES:
            return _DTYPES[spec.dtype]
        return torch.float32 if self.wide_weights and _may_be_wide(name, spec) else self.dtype

    def is_constant(self, value: Any) -> bool:
        """Whether a literal in a trace at this probe is surely part of the maths, and follows from no size or dtype."""
        if isinstance(value, torch.device):
            return False  # a probe is on meta
        if isinstance(value, torch.dtype):
            return value != self.dtype or value == torch.float32
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return value == _TO_THE_END or (abs(value) <= _SMALL and float(2 * value).is_integer())


def _may_be_wide(name: str, spec: TensorSpec) -> bool:
    return spec.shape is not None and (len(spec.shape) == 1 or name == "bias")


def _number(spec: TensorSpec, position: int) -> float:
    """What the scalar input at a position is."""
    number = _SEED + 2 * position
    return number if "int" in spec.dtype else 0.0625 * number + 0.001


def probes(definition: Definition) -> Iterator[Probe]:
    """16-bit and float32 in every case, 16-bit with float32 norm weights, each with and without groups; and with
    other tables."""
    has_weight = any(_may_be_wide(name, spec) for name, spec in definition.inputs.items())
    tables = [spec.dtype for name, spec in definition.inputs.items() if name in _TABLES]
    constraints = definition.constraints or ()
    has_groups = any((m := _DIVIDES.match(c) or _PRODUCT.match(c)) and m[2] in definition.axes for c in constraints)
    cases = max((len(c.split(_OR)) for c in constraints), default=1)
    for dtype, wide in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        for equal in (False, True):
            if (has_weight or not wide) and (has_groups or not equal):
                yield from (Probe(dtype, wide, equal, case=case) for case in range(1 if wide or equal else cases))
    if tables:
        yield Probe(torch.bfloat16, tables=torch.float32 if tables[0] in _HALVES else torch.bfloat16)


#: Sizes are even and twice as large or more; a number up to _SMALL, or half of one, is therefore none.
_SEED, _SMALL = 17, 8
_TO_THE_END = 2**63 - 1
_OR = " or "
_SUM = re.compile(r"^(\w+) == (\w+) \+ (\w+)$")
_EQUALS = re.compile(r"^(\w+) == (?:(\d+) \* )?(\w+)$")
_PRODUCT = re.compile(r"^(\w+) == (\w+) \* (\w+)$")
_DIVIDES = re.compile(r"^(\w+) % (\w+) == 0$")
#: How an axis may stand to a whole number that is an input; a path through the reference may hang on it.
_TO_NUMBER = re.compile(r"^(\w+)(?: % (\w+) (==|!=) 0| (==|<) (\w+))$")


def probe_axes(definition: Definition, *, equal: bool = False, case: int = 0) -> dict[str, int]:
    """Distinct sizes for the axes of a Definition that satisfy its constraints; even where they are free.

    Args:
        definition: Whose axes.
        equal: Satisfy ``A % B == 0`` by ``A == B`` instead of a multiple, and ``A == B * C`` by ``A == C``.
        case: Which part of a constraint ``A or B`` to satisfy.

    Raises:
        PatternError: If a constraint has a form that is not understood.
    """
    axes: dict[str, int] = {}
    for position, (name, axis) in enumerate(definition.axes.items()):
        axes[name] = axis.value if axis.type == "const" else 2 * (_SEED + (_SEED + 2) * position)
    scalars = {name: _number(spec, i) for i, (name, spec) in enumerate(definition.inputs.items()) if spec.shape is None}
    for text in definition.constraints or ():
        constraint = text.split(_OR)[min(case, text.count(_OR))]
        match = _TO_NUMBER.match(constraint)
        number = scalars.get(match[2] or match[5]) if match and (match[2] or constraint != text) else None
        if match and number is not None:
            axes[match[1]] = _beside(int(number), match[3] or match[4], divided=match[2] is not None)
        elif scalars.keys() & set(re.findall(r"\w+", constraint)):
            continue  # it limits what a call may give, not the sizes of the inputs
        elif match := _EQUALS.match(constraint):
            axes[match[1]] = int(match[2] or 1) * axes[match[3]]
        elif match := _SUM.match(constraint):
            axes[match[1]] = axes[match[2]] + axes[match[3]]
        elif match := _PRODUCT.match(constraint):
            axes[match[2]] = 1 if equal else axes[match[2]]
            axes[match[1]] = axes[match[2]] * axes[match[3]]
        elif match := _DIVIDES.match(constraint):
            divisor = axes.get(match[2]) or 2 * int(match[2])
            axes[match[1]] = divisor * (1 if equal and match[2] in axes else _SEED)
        else:
            raise PatternError(
                f"definition {definition.name}: constraint {text!r} has a form that is not understood",
                advice="Write `A == n * B`, `A == B * C`, `A == B + C` or `A % B == 0`",
            )
    return axes


def _beside(number: int, relation: str, *, divided: bool) -> int:
    """A size that stands in a relation to a number: a multiple of it or none, the number itself, or less.

    What is left to the next multiple is no small number, nor are there few multiples below the size.
    """
    if divided:
        return 2 * _SEED * number + (number // 2 if relation == "!=" else 0)
    return number if relation == "==" else number - _SMALL - 1
