"""Declared shapes as a guard: which inputs have them, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inventory_roots import with_reference, write_repository
from pass_checks import capture
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tilegym_fx.axes import Shape, declared
from tilegym_fx.inventory import load
from tilegym_fx.match import Matcher
from tilegym_fx.normalize import normalize
from tilegym_fx.pattern import patterns_of
from tilegym_fx.results import Site
from tilegym_fx.schema import Definition


def guard_of(
    inputs: dict[str, str | None],
    shapes: dict[str, Shape | None] | None = None,
    constants: dict[str, int] | None = None,
    constraints: tuple[str, ...] = (),
) -> Callable[..., str | None]:
    """The guard of a Definition with tensors of these axes; None for a number."""
    axes: dict[str, Any] = {axis: {"type": "var"} for text in inputs.values() for axis in (text or "").split()}
    axes |= {axis: {"type": "const", "value": value} for axis, value in (constants or {}).items()}
    tensors = {
        k: {"shape": None if v is None else v.split(), "dtype": "int64" if v is None else "bfloat16"}
        for k, v in inputs.items()
    }
    record = {
        "name": "own", "op_type": "own", "axes": axes, "inputs": tensors, "constraints": constraints,
        "outputs": {"out": next(iter(tensors.values()))},
        "reference": f"def run({', '.join(tensors)}):\n    pass\n",
    }  # fmt: skip
    return declared(Definition.model_validate(record), shapes or {})


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("x", "z", "said"),
    [
        ((5, 8), (8, 3), None),
        ((5, 8), (1, 3), "z is [1, 3], not [H, K] with H = 8: the kernel does not broadcast"),
        ((5, 8), (3, 8), "z is [3, 8], not [H, K] with H = 8: the kernel does not broadcast"),
        ((5, 8), (8,), "z has 1 dimensions, not 2"),
        ((2, 5, 8), (8, 3), "x has 3 dimensions, not 2"),
    ],
    ids=str,
)
def test_an_axis_has_one_size(x: tuple[int, ...], z: tuple[int, ...], said: str | None) -> None:
    assert guard_of({"x": "M H", "z": "H K"})(x=zeros(*x), z=zeros(*z)) == said


@pytest.mark.parametrize(
    ("x", "z", "fits"),
    [
        ((5, 8), (5, 3), True),
        ((8,), (3,), True),
        ((2, 5, 8), (2, 5, 3), True),
        ((2, 5, 8), (10, 3), False),
        ((2, 5, 8), (1, 5, 3), False),
        ((2, 5, 8), (5, 3), False),
        ((8,), (), False),
    ],
    ids=str,
)
def test_n_is_the_same_leading_dimensions_everywhere(x: tuple[int, ...], z: tuple[int, ...], fits: bool) -> None:
    assert (guard_of({"x": "N H", "z": "N K"})(x=zeros(*x), z=zeros(*z)) is None) == fits


def test_a_constant_axis_has_its_value() -> None:
    guard = guard_of({"x": "M H"}, constants={"H": 4096})
    assert guard(x=zeros(2, 4096)) is None
    assert guard(x=zeros(2, 2048)) == "x is [2, 2048], not [M, H] with M = 2, H = 4096: the kernel does not broadcast"


@pytest.mark.parametrize(("q", "k", "fits"), [(6, 2, True), (6, 4, False), (0, 2, True), (6, 0, False), (0, 0, False)])
def test_a_constraint_holds_and_nothing_is_divided_by_zero(q: int, k: int, fits: bool) -> None:
    said = guard_of({"q": "Hq", "k": "Hk"}, constraints=("Hq % Hk == 0",))(q=zeros(q), k=zeros(k))
    assert said == (None if fits else f"Hq % Hk == 0 does not hold for Hk = {k}, Hq = {q}")


def test_a_constraint_may_name_numbers_and_leading_dimensions() -> None:
    guard = guard_of({"x": "N K", "rows": "P", "k": None}, constraints=("P == N * K", "k <= K", "E == 3"))
    assert guard(x=zeros(2, 5, 3), rows=zeros(30), k=3) is None
    assert guard(x=zeros(2, 5, 3), rows=zeros(30), k=4) == "k <= K does not hold for K = 3, k = 4"
    assert guard(x=zeros(2, 5, 3), rows=zeros(15), k=3) is not None


class TestOtherShapes:
    def test_alternatives_are_alike_wherever_they_stand(self) -> None:
        shapes: dict[str, Shape | None] = {"cos": ("1 or B", "S"), "sin": ("1 or B", "S")}
        guard = guard_of({"q": "B S", "cos": "B S", "sin": "B S"}, shapes)

        def fits(cos: int, sin: int) -> bool:
            return guard(q=zeros(3, 5), cos=zeros(cos, 5), sin=zeros(sin, 5)) is None

        assert (fits(3, 3), fits(1, 1), fits(1, 3), fits(2, 2)) == (True, True, False, False)

    def test_expressions(self) -> None:
        guard = guard_of({"q": "B H", "bias": "H"}, {"bias": ("H or B * H",)})
        assert [guard(q=zeros(3, 5), bias=zeros(n)) is None for n in (5, 15, 3)] == [True, True, False]

    def test_leading_dimensions(self) -> None:
        guard = guard_of({"x": "B S H", "z": "B S H"}, {"x": ("...", "H"), "z": ("...", "H")})
        assert guard(x=zeros(7, 8), z=zeros(7, 8)) is None
        assert guard(x=zeros(7, 8), z=zeros(1, 8)) is not None

    def test_none_leaves_an_input_to_guards(self) -> None:
        guard = guard_of({"x": "B H", "z": "B H"}, {"z": None}, constraints=("B == H",))
        assert guard(x=zeros(8, 8), z=zeros(4)) is None


def test_sizes_that_are_one_symbol_are_alike_and_nothing_is_assumed_of_them() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(*shape: int) -> torch.Tensor:
        sizes = [DimDynamic.DUCK if size in (3, 5) else DimDynamic.STATIC for size in shape]
        return mode.from_tensor(zeros(*shape), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    guard = guard_of({"x": "N H", "z": "N H", "ids": "B S", "mask": "B S"}, {"mask": ("1 or B", "S")})
    x, mask = fake(3, 5, 8), fake(3, 5)
    assert guard(x=x, z=fake(3, 5, 8), ids=fake(3, 5), mask=mask) is None
    assert guard(x=x, z=fake(3, 5, 4), ids=fake(3, 5), mask=mask) is not None
    assert mode.shape_env is not None
    assert mode.shape_env.guards == []


def test_a_definition_for_one_size_is_found_at_that_size_alone(tmp_path: Path) -> None:
    """As those of other inventories are: their kernels are built for it, and their references need not say so."""
    axes = {"N": {"type": "var"}, "D": {"type": "const", "value": 8}}
    inventory = load(write_repository(tmp_path, with_reference("one_size", "return torch.tanh(x) * scale", axes=axes)))
    matcher = Matcher(inventory.definitions, patterns_of(inventory, "one_size"))
    for columns, found in ((8, 1), (4, 0)):
        graph = capture(lambda x: torch.tanh(x) * 0.3, [zeros(5, columns)]).graph
        normalize(graph)
        matches, misses = matcher.match(graph, lambda node: Site())
        assert len(matches) == found
        assert found or "D = 8" in misses[0].reason
