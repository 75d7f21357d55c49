"""Small random inputs for a Definition, and what a function makes of them beside what is declared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tilegym_fx.inventory.sizes import CannotTryError, is_int_scalar, scalar_value, sizes_of
from tilegym_fx.schema import Definition, Problem, TensorSpec

_MAX_ELEMENTS = 1 << 25


def sample_inputs(
    definition: Definition,
    sizes: Mapping[str, int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Random CPU inputs by name, in order: floats between 0 and 1, ints 0 or 1, masks all true.

    Args:
        definition: Whose inputs.
        sizes: Axis -> size, and int scalar -> value; made up where absent.
        dtype: Takes the place of bfloat16 where given.
        seed: Of the random numbers.

    Raises:
        CannotTryError: No inputs can be made up, or they would be large.
    """
    sizes = {**sizes_of(definition), **(sizes or {})}
    generator = torch.Generator().manual_seed(seed)
    total = sum(_count(spec, sizes) for spec in (*definition.inputs.values(), *definition.outputs.values()))
    if total > _MAX_ELEMENTS:
        raise CannotTryError(f"its constant axes make {total:,} elements")
    return {name: _value(name, spec, sizes, dtype, generator) for name, spec in definition.inputs.items()}


def try_function(
    definition: Definition, function: Callable[..., Any], *, equal: bool = False, may_write: bool = False
) -> list[Problem]:
    """Calls a function as the reference is called and compares shapes and dtypes with the declared outputs.

    Args:
        definition: What it should compute.
        function: Takes the inputs by name.
        equal: Make sizes equal where the constraints allow it.
        may_write: Writing to an input that does not say so is no problem.

    Returns:
        What is wrong, on the field ``reference``.

    Raises:
        CannotTryError: No inputs can be made up.
    """
    sizes = sizes_of(definition, equal=equal)
    inputs = sample_inputs(definition, sizes)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        result = function(**inputs)
    found = list(_result_problems(definition, sizes, result))
    for name, copy in before.items() if not may_write else ():
        if not definition.inputs[name].inplace_output and not torch.equal(copy, inputs[name]):
            found.append(f"writes to its input {name!r}")
    return [Problem("reference", problem, "correct the code or the declaration") for problem in found]


def _result_problems(definition: Definition, sizes: Mapping[str, int], result: Any) -> Iterator[str]:
    if isinstance(result, Mapping):
        values: Sequence[Any] = [result.get(name) for name in definition.outputs]
    else:
        values = result if isinstance(result, tuple | list) else (result,)
    if len(values) != len(definition.outputs):
        yield f"returns {len(values)} values where {len(definition.outputs)} are declared"
        return
    for (name, spec), value in zip(definition.outputs.items(), values, strict=True):
        for problem in _value_problems(spec, sizes, value):
            yield f"returns {name!r} {problem}"


def _value_problems(spec: TensorSpec, sizes: Mapping[str, int], value: Any) -> Iterator[str]:
    tensor = isinstance(value, torch.Tensor)
    if spec.shape is None:
        if not isinstance(value, bool | int | float) and not (tensor and value.dim() == 0):
            yield f"as a {type(value).__name__} where a scalar is declared"
    elif not tensor:
        yield f"as a {type(value).__name__} where a tensor is declared"
    else:
        declared = [sizes[axis] for axis in spec.shape]
        if list(value.shape) != declared:
            yield f"in shape {list(value.shape)} where [{', '.join(spec.shape)}] = {declared} is declared"
        if value.dtype != _dtype(spec):
            yield f"as {str(value.dtype).removeprefix('torch.')} where {spec.dtype} is declared"


def _value(
    name: str,
    spec: TensorSpec,
    sizes: Mapping[str, int],
    dtype: torch.dtype | None,
    generator: torch.Generator,
) -> Any:
    if spec.shape is None:
        return sizes[name] if is_int_scalar(spec) else scalar_value(spec)
    kind = dtype if dtype is not None and spec.dtype == "bfloat16" else _dtype(spec)
    shape = [sizes[axis] for axis in spec.shape]
    if kind == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if kind.is_complex:
        return torch.rand(shape, generator=generator, dtype=kind)
    if not kind.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(kind)
    return torch.rand(shape, generator=generator).to(kind)


def _dtype(spec: TensorSpec) -> torch.dtype:
    kind = getattr(torch, spec.dtype, None)
    if not isinstance(kind, torch.dtype):
        raise CannotTryError(f"torch has no dtype {spec.dtype}")
    return kind


def _count(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in spec.shape or ())
