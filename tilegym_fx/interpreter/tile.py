"""The values inside a kernel: tiles, runtime integer scalars, and the operators between them.

A :class:`Tile` holds a torch tensor. A :class:`Scalar` is a runtime integer (a block index, an array's
length, a loop variable): a Python int with a cuTile dtype, because index arithmetic through torch would be
slow. Plain Python numbers are compile-time constants, as in cuTile, and take the dtype of what they meet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter import dtypes
from tilegym_fx.interpreter.errors import InterpreterError, TileTypeError

#: What a compile-time constant can be.
NUMBERS = (bool, int, float)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: a key of _result_dtypes
class BinaryOp:
    """One binary operation, on tensors of one dtype and on Python integers.

    Attributes:
        name: As in ``ct.<name>``.
        tensors: Computes it on two tensors (one may be a Python number) of the same dtype.
        numbers: Computes it on two Python integers.
        kind: ``arithmetic``, ``compare``, ``bitwise`` or ``shift``.
        force_float: Integers become float32 first.
    """

    name: str
    tensors: Callable[[Any, Any], torch.Tensor]
    numbers: Callable[[Any, Any], Any]
    kind: str = "arithmetic"
    force_float: bool = False


def _floor_divide(x: Any, y: Any) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _ceil_divide(x: Any, y: Any) -> torch.Tensor:
    return -torch.div(-x, y, rounding_mode="floor")


def _as_tensors(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """For torch functions that take no Python number on one side or the other."""

    def call(x: Any, y: Any) -> torch.Tensor:
        like = x if isinstance(x, torch.Tensor) else y
        x, y = (v if isinstance(v, torch.Tensor) else like.new_tensor(v) for v in (x, y))
        return function(x, y)

    return call


def _ceil_of_integers(x: int, y: int) -> int:
    return -(-x // y)


OPS: dict[str, BinaryOp] = {
    op.name: op
    for op in (
        BinaryOp("add", operator.add, operator.add),
        BinaryOp("sub", operator.sub, operator.sub),
        BinaryOp("mul", operator.mul, operator.mul),
        BinaryOp("truediv", operator.truediv, operator.truediv, force_float=True),
        BinaryOp("floordiv", _as_tensors(_floor_divide), operator.floordiv),
        BinaryOp("cdiv", _as_tensors(_ceil_divide), _ceil_of_integers),
        BinaryOp("mod", _as_tensors(torch.remainder), operator.mod),
        BinaryOp("pow", operator.pow, operator.pow),
        BinaryOp("minimum", _as_tensors(torch.fmin), min),
        BinaryOp("maximum", _as_tensors(torch.fmax), max),
        BinaryOp("minimum_nan", _as_tensors(torch.minimum), min),
        BinaryOp("maximum_nan", _as_tensors(torch.maximum), max),
        BinaryOp("atan2", _as_tensors(torch.atan2), math.atan2, force_float=True),
        BinaryOp("equal", operator.eq, operator.eq, "compare"),
        BinaryOp("not_equal", operator.ne, operator.ne, "compare"),
        BinaryOp("less", operator.lt, operator.lt, "compare"),
        BinaryOp("less_equal", operator.le, operator.le, "compare"),
        BinaryOp("greater", operator.gt, operator.gt, "compare"),
        BinaryOp("greater_equal", operator.ge, operator.ge, "compare"),
        BinaryOp("bitwise_and", operator.and_, operator.and_, "bitwise"),
        BinaryOp("bitwise_or", operator.or_, operator.or_, "bitwise"),
        BinaryOp("bitwise_xor", operator.xor, operator.xor, "bitwise"),
        BinaryOp("bitwise_lshift", operator.lshift, operator.lshift, "shift"),
        BinaryOp("bitwise_rshift", operator.rshift, operator.rshift, "shift"),
    )
}


def _operator(name: str) -> Callable[[Any, Any], Any]:
    op = OPS[name]

    def forward(self: Any, other: Any) -> Any:
        return binary(op, self, other) if isinstance(other, _OPERANDS) else NotImplemented

    return forward


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    op = OPS[name]

    def backward(self: Any, other: Any) -> Any:
        return binary(op, other, self) if isinstance(other, _OPERANDS) else NotImplemented

    return backward


class _Value:
    """The operators that tiles and scalars share."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    __add__, __radd__ = _operator("add"), _reflected("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__, __rmul__ = _operator("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _operator("truediv"), _reflected("truediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _reflected("floordiv")
    __mod__, __rmod__ = _operator("mod"), _reflected("mod")
    __pow__, __rpow__ = _operator("pow"), _reflected("pow")
    __and__, __rand__ = _operator("bitwise_and"), _reflected("bitwise_and")
    __or__, __ror__ = _operator("bitwise_or"), _reflected("bitwise_or")
    __xor__, __rxor__ = _operator("bitwise_xor"), _reflected("bitwise_xor")
    __lshift__, __rlshift__ = _operator("bitwise_lshift"), _reflected("bitwise_lshift")
    __rshift__, __rrshift__ = _operator("bitwise_rshift"), _reflected("bitwise_rshift")
    __eq__ = _operator("equal")
    __ne__ = _operator("not_equal")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")


class Scalar(_Value):
    """A runtime integer: its value is known here, but to cuTile's compiler it is no constant."""

    __slots__ = ("dtype", "value")
    shape: tuple[int, ...] = ()
    ndim = 0

    def __init__(self, value: int, dtype: ct.DType = ct.int32) -> None:
        low, high = dtypes.integer_range(dtype)
        if not low <= value <= high:
            raise InterpreterError(
                f"the integer {value} overflows {dtype.name}",
                advice="Annotate the parameter with ct.ScalarInt64 or ct.IndexedWithInt64",
            )
        self.value = value
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"{self.dtype.name}({self.value})"

    def __bool__(self) -> bool:
        return self.value != 0

    def __neg__(self) -> Scalar:
        return Scalar(-self.value, self.dtype)

    def __pos__(self) -> Scalar:
        return self

    def __invert__(self) -> Scalar:
        return Scalar(~self.value, self.dtype)

    def __abs__(self) -> Scalar:
        return Scalar(abs(self.value), self.dtype)

    def __int__(self) -> int:
        raise TileTypeError("int() of a runtime scalar; it takes compile-time constants only")

    def __float__(self) -> float:
        raise TileTypeError("float() of a runtime scalar; it takes compile-time constants only")


class Tile(_Value):
    """An immutable tile.

    Args:
        data: Its elements; every length must be a power of two.
        dtype: Its cuTile dtype (the tensor's own unless it is tfloat32 held in float32).
    """

    __slots__ = ("data", "dtype")

    def __init__(self, data: torch.Tensor, dtype: ct.DType) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def __repr__(self) -> str:
        return f"Tile({self.dtype.name}{list(self.shape)})"

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise TileTypeError(f"the truth value of a tile of shape {self.shape}; only a 0-d tile has one")
        return bool(self.data)

    def __neg__(self) -> Tile:
        return Tile(-self.data, self.dtype)

    def __pos__(self) -> Tile:
        return self

    def __abs__(self) -> Tile:
        return Tile(self.data.abs(), self.dtype)

    def __invert__(self) -> Tile:
        if dtypes.category(self.dtype) == dtypes.FLOAT:
            raise TileTypeError(f"~ of a {self.dtype.name} tile")
        return Tile(~self.data, self.dtype)

    def __setitem__(self, key: object, value: object) -> None:
        raise TileTypeError("tiles are immutable: item assignment")

    def __iter__(self) -> None:
        raise TileTypeError("a tile cannot be iterated over or unpacked; use ct.extract")


_OPERANDS = (Tile, Scalar, bool, int, float)


def as_tile(value: Any) -> Tile:
    """A tile, or a scalar or number as a 0-d tile.

    Raises:
        TileTypeError: It is none of these.
    """
    if isinstance(value, Tile):
        return value
    if isinstance(value, Scalar):
        return Tile(torch.tensor(value.value, dtype=dtypes.TORCH[value.dtype]), value.dtype)
    if isinstance(value, NUMBERS):
        dtype = dtypes.dtype_of_number(value)
        return Tile(torch.tensor(value, dtype=dtypes.TORCH[dtype]), dtype)
    raise TileTypeError(f"expected a tile, but got {type(value).__name__}")


def common_dtype(x: Any, y: Any, force_float: bool = False) -> ct.DType:
    """The dtype in which two operands are mixed.

    Raises:
        TileTypeError: cuTile asks for an explicit cast.
    """
    x_loose, y_loose = isinstance(x, NUMBERS), isinstance(y, NUMBERS)
    if x_loose and y_loose:
        dtype = dtypes.promote(dtypes.dtype_of_number(x), dtypes.dtype_of_number(y))
    elif x_loose:
        dtype = _promote_number(y.dtype, x, force_float)
    elif y_loose:
        dtype = _promote_number(x.dtype, y, force_float)
    else:
        dtype = x.dtype if x.dtype is y.dtype else dtypes.promote(x.dtype, y.dtype)
    return ct.float32 if force_float and dtypes.category(dtype) != dtypes.FLOAT else dtype


def _promote_number(dtype: ct.DType, value: Any, force_float: bool) -> ct.DType:
    if force_float and dtypes.category(dtype) != dtypes.FLOAT:
        return ct.float32
    return dtypes.promote_number(dtype, value)


def operand(value: Any, dtype: ct.DType) -> Any:
    """The tensor (or number) that stands for ``value`` in an operation carried out in ``dtype``."""
    if type(value) is Tile:
        return value.data if value.dtype is dtype else dtypes.cast(value.data, dtype)
    return dtypes.constant(value.value if type(value) is Scalar else value, dtype)


#: What _checked_dtype said for an operation on two kinds of operand; it only grows with the kinds in use.
_result_dtypes: dict[tuple[BinaryOp, Any, Any], ct.DType] = {}


def _kind(value: Any) -> Any:
    """What decides the dtype of a result: the dtype, a constant's type, or None where its value counts."""
    kind = type(value)
    if kind is Tile or kind is Scalar:
        return value.dtype
    return None if kind is int and not 0 <= value <= 127 else kind


def _result_dtype(op: BinaryOp, x: Any, y: Any) -> ct.DType:
    key = (op, _kind(x), _kind(y))
    dtype = _result_dtypes.get(key)
    if dtype is None:
        dtype = _checked_dtype(op, x, y)
        if None not in key:
            _result_dtypes[key] = dtype
    return dtype


def binary(op: BinaryOp, x: Any, y: Any) -> Any:
    """``op`` with cuTile's promotion and broadcasting.

    Raises:
        TileTypeError: Dtypes that do not mix, or shapes that do not broadcast.
    """
    if type(x) is not Tile and type(y) is not Tile:
        return _binary_of_scalars(op, x, y)
    dtype = _result_dtype(op, x, y)
    try:
        data = op.tensors(operand(x, dtype), operand(y, dtype))
    except RuntimeError as problem:
        raise TileTypeError(f"{op.name} of {x!r} and {y!r}: {problem}") from problem
    return Tile(data, ct.bool_ if op.kind == "compare" else dtype)


def _checked_dtype(op: BinaryOp, x: Any, y: Any) -> ct.DType:
    dtype = common_dtype(x, y, op.force_float)
    if op.kind == "compare":
        return dtype
    kind = dtypes.category(dtype)
    if op.kind == "arithmetic":
        if kind == dtypes.BOOL:
            raise TileTypeError(f"{op.name} of two bools; cast them to an integer")
        if dtype is ct.tfloat32:
            raise TileTypeError(f"{op.name} in tfloat32, which only ct.mma and ct.matmul take")
        if op.name == "pow" and kind != dtypes.FLOAT:
            raise TileTypeError("pow of integers, which cuTile does not implement")
        return dtype
    if kind == dtypes.FLOAT or (op.kind == "shift" and kind == dtypes.BOOL):
        raise TileTypeError(f"{op.name} of {x!r} and {y!r}; it takes integers" + " or bools" * (op.kind == "bitwise"))
    strict = [v.dtype for v in (x, y) if isinstance(v, Tile | Scalar)]
    if op.kind == "bitwise" and len(strict) == 2 and strict[0] != strict[1]:
        raise TileTypeError(f"{op.name} of {strict[0].name} and {strict[1].name}, which must be equal")
    return dtype


def _binary_of_scalars(op: BinaryOp, x: Any, y: Any) -> Any:
    x_number = x.value if type(x) is Scalar else x
    y_number = y.value if type(y) is Scalar else y
    if type(x) is not Scalar and type(y) is not Scalar:
        return op.numbers(x_number, y_number)
    dtype = _result_dtype(op, x, y)
    if op.kind == "compare":
        return op.numbers(x_number, y_number)
    if dtypes.category(dtype) == dtypes.FLOAT:
        held = dtypes.TORCH[dtype]
        return Tile(op.tensors(torch.tensor(x_number, dtype=held), torch.tensor(y_number, dtype=held)), dtype)
    if y_number == 0 and op.name in ("floordiv", "cdiv", "mod"):
        raise InterpreterError(f"{op.name} of {x!r} by zero", advice="Guard the division: a GPU gives garbage here")
    return Scalar(op.numbers(x_number, y_number), dtype)
