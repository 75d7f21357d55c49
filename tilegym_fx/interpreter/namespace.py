"""What the name ``ct`` means while a kernel is interpreted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import cuda.tile as ct
import torch

from tilegym_fx.interpreter import atomics, maths, memory, shapes
from tilegym_fx.interpreter.checks import index_value
from tilegym_fx.interpreter.errors import InterpreterError, TileTypeError, UnsupportedOpError
from tilegym_fx.interpreter.tile import Scalar, as_tile


class Range:
    """``range`` inside a kernel: a run-time loop, whose variable is an int32 scalar and no constant.

    Raises:
        TileTypeError: The step is not positive.
    """

    def __init__(self, *bounds: Any) -> None:
        self.values = range(*(index_value(bound) for bound in bounds))
        if self.values.step <= 0:
            raise TileTypeError(f"range with step {self.values.step}; it must be positive")

    def __iter__(self) -> Iterator[Scalar]:
        return map(Scalar, self.values)

    def __len__(self) -> int:
        return len(self.values)


def static_iter(iterable: Any) -> Any:
    """``ct.static_iter``: an unrolled loop, whose variable is a constant."""
    return iter(iterable.values if isinstance(iterable, Range) else iterable)


def static_eval(value: Any) -> Any:
    """``ct.static_eval``."""
    return value


def static_assert(condition: Any, message: str | None = None) -> None:
    """``ct.static_assert``."""
    if not condition:
        raise TileTypeError(f"static_assert failed: {message or 'no message'}")


def assert_(condition: Any, message: str | None = None) -> None:
    """``ct.assert_``."""
    if not bool(as_tile(condition).data.all()):
        raise InterpreterError(f"assert_ failed: {message or 'no message'}", advice="The kernel's own check says no")


def assume_divisible_by(x: Any, divisor: int) -> Any:
    """``ct.assume_divisible_by``, which a GPU believes and the interpreter checks."""
    if index_value(x) % divisor:
        raise InterpreterError(f"{x!r} is not divisible by {divisor}", advice="Drop assume_divisible_by here")
    return x


def nothing() -> None:
    """An operation that only orders work on a GPU."""


_UNARY: dict[str, tuple[Any, Any, str]] = {
    "abs": (torch.abs, abs, "keep"),
    "ceil": (torch.ceil, math.ceil, "refuse"),
    "cos": (torch.cos, math.cos, "float"),
    "cosh": (torch.cosh, math.cosh, "float"),
    "exp": (torch.exp, math.exp, "float"),
    "exp2": (torch.exp2, lambda x: 2**x, "float"),
    "floor": (torch.floor, math.floor, "refuse"),
    "log": (torch.log, math.log, "float"),
    "log2": (torch.log2, math.log2, "float"),
    "negative": (torch.neg, lambda x: -x, "keep"),
    "rsqrt": (torch.rsqrt, maths.rsqrt_of_number, "float"),
    "sin": (torch.sin, math.sin, "float"),
    "sinh": (torch.sinh, math.sinh, "float"),
    "sqrt": (torch.sqrt, math.sqrt, "float"),
    "tan": (torch.tan, math.tan, "float"),
    "tanh": (torch.tanh, math.tanh, "float"),
}
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "cdiv", "mod", "pow", "atan2",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_lshift", "bitwise_rshift",
)  # fmt: skip

#: Name in cuda.tile -> the function that stands for it.
OPERATIONS: dict[str, Any] = {
    **{name: maths.unary(name, *how) for name, how in _UNARY.items()},
    **{name: maths.binary_function(name) for name in _BINARY},
    "minimum": maths.binary_function("minimum", with_nan=True),
    "maximum": maths.binary_function("maximum", with_nan=True),
    "sum": maths.fold("sum"),
    "prod": maths.fold("prod"),
    "max": maths.extreme("max"),
    "min": maths.extreme("min"),
    "argmax": maths.arg_extreme("argmax"),
    "argmin": maths.arg_extreme("argmin"),
    "cumsum": maths.cumulate("cumsum"),
    "cumprod": maths.cumulate("cumprod"),
    "isnan": maths.isnan,
    "where": maths.where,
    "mma": maths.mma,
    "matmul": maths.matmul,
    "load": memory.load,
    "store": memory.store,
    "gather": memory.gather,
    "scatter": memory.scatter,
    "num_tiles": memory.num_tiles,
    **{name: atomics.read_modify_write(name) for name in atomics.UPDATES},
    "atomic_cas": atomics.compare_and_swap,
    "arange": shapes.arange,
    "astype": shapes.astype,
    "bitcast": shapes.bitcast,
    "broadcast_to": shapes.broadcast_to,
    "cat": shapes.cat,
    "expand_dims": shapes.expand_dims,
    "extract": shapes.extract,
    "full": shapes.full,
    "insert": shapes.insert,
    "ones": shapes.ones,
    "pack_to_bytes": shapes.pack_to_bytes,
    "permute": shapes.permute,
    "reshape": shapes.reshape,
    "transpose": shapes.transpose,
    "unpack_from_bytes": shapes.unpack_from_bytes,
    "zeros": shapes.zeros,
    "assert_": assert_,
    "assume_divisible_by": assume_divisible_by,
    "static_assert": static_assert,
    "static_eval": static_eval,
    "static_iter": static_iter,
    "grid_dependency_control_wait": nothing,
    "grid_dependency_control_launch_dependents": nothing,
}


class DTypeName:
    """A dtype as ``ct.<name>`` in a kernel: equal to the dtype, and callable to make a scalar of it."""

    def __init__(self, dtype: ct.DType) -> None:
        self._dtype = dtype

    def __call__(self, value: Any = 0) -> Any:
        return shapes.astype(value, self._dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dtype, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._dtype == (other._dtype if isinstance(other, DTypeName) else other))

    def __hash__(self) -> int:
        return hash(self._dtype)

    def __repr__(self) -> str:
        return repr(self._dtype)


#: Python builtins that mean something else inside a kernel.
BUILTINS: dict[str, Any] = {
    "abs": OPERATIONS["abs"],
    "max": maths.python_max,
    "min": maths.python_min,
    "range": Range,
}


class Namespace:
    """Stands for the module ``cuda.tile``: its operations, its dtypes and enums, and where this block is.

    Args:
        grid: Number of blocks along the three axes.
    """

    def __init__(self, grid: tuple[int, int, int]) -> None:
        self._blocks = tuple(Scalar(n) for n in grid)
        self.block: tuple[Scalar, ...] = (Scalar(0),) * 3

    def bid(self, axis: int) -> Scalar:
        """``ct.bid``."""
        return self.block[_grid_axis(axis)]

    def num_blocks(self, axis: int) -> Scalar:
        """``ct.num_blocks``."""
        return self._blocks[_grid_axis(axis)]

    def __getattr__(self, name: str) -> Any:
        value = _meaning(name)
        setattr(self, name, value)
        return value


def _meaning(name: str) -> Any:
    """What ``ct.<name>`` is inside a kernel, apart from the block's place.

    Raises:
        UnsupportedOpError: An operation that is not interpreted, or no name of cuda.tile.
    """
    if name in OPERATIONS:
        return OPERATIONS[name]
    try:
        real = getattr(ct, name)
    except AttributeError as problem:
        raise UnsupportedOpError(f"cuda.tile has no {name!r}") from problem
    if isinstance(real, ct.DType):
        return DTypeName(real)
    if inspect.isroutine(real):
        raise UnsupportedOpError(f"ct.{name} is not interpreted")
    return real


def _grid_axis(axis: int) -> int:
    if type(axis) is not int or not 0 <= axis <= 2:
        raise TileTypeError(f"the grid has axes 0, 1 and 2, not {axis!r}")
    return axis
