"""Kernels are not given inputs whose axes differ: what the reference would broadcast, gather or leave unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from inputs import INVENTORY, NARROW, make_inputs
from pass_checks import check_pass, rand

from tilegym_fx.pattern import forms_of

#: More than two sequences: one less is no batch that all share.
SIZES = {"B": 3}


def shapes_of(name: str) -> dict[str, tuple[str, ...]]:
    """What each tensor input may look like; declared shapes where guards decide."""
    specs = INVENTORY.definitions[name].inputs.items()
    return {k: INVENTORY.shapes(name).get(k) or s.shape for k, s in specs if s.shape is not None}


def shared_axes() -> Iterator[tuple[str, str, int]]:
    """Definition, input and dimension of every axis that has its size from elsewhere too."""
    for name in INVENTORY.definitions:
        shapes = shapes_of(name)
        often = Counter(axis for shape in shapes.values() for axis in shape)
        for key, shape in shapes.items():
            for dimension, axis in enumerate(shape):
                if axis != "..." and (often[axis] > 1 or not axis.isidentifier()):
                    yield name, key, dimension - len(shape)


def refusal(name: str, inputs: dict[str, Any]) -> str | None:
    """The first thing that speaks against a place with these inputs."""
    return next((said for guard in next(forms_of(INVENTORY, name)).guards if (said := guard(**inputs))), None)


@pytest.mark.parametrize("name", INVENTORY.definitions)
def test_what_is_declared_is_accepted(name: str) -> None:
    assert refusal(name, inputs_of(name)) is None


@pytest.mark.parametrize(("name", "key", "dimension"), list(shared_axes()))
def test_an_axis_that_is_shorter_in_one_input_is_refused(name: str, key: str, dimension: int) -> None:
    inputs = inputs_of(name)
    size = inputs[key].shape[dimension]
    for cut in {1, size - 1} if size > 1 else ():
        changed = {**inputs, key: inputs[key].narrow(dimension, 0, cut)}
        if refusal(name, changed) is None:
            assert cut == 1, f"{key} of {list(changed[key].shape)} would match"
            assert " or " in shapes_of(name)[key][dimension] or INVENTORY.shapes(name).get(key, ()) is None


def inputs_of(name: str) -> dict[str, Any]:
    return make_inputs(name, torch.bfloat16 if name in NARROW else torch.float32, "ordinary", "as trained", SIZES)


@pytest.mark.parametrize("name", INVENTORY.definitions)
def test_shapes_are_those_of_inputs_with_other_axes(name: str) -> None:
    """What `SHAPES` says is said of an input, and is not what the Definition says already."""
    specs = INVENTORY.definitions[name].inputs
    for key, shape in INVENTORY.shapes(name).items():
        assert key in specs
        assert shape != specs[key].shape or any(s != specs[k].shape for k, s in INVENTORY.shapes(name).items())


def experts(columns: int) -> tuple[Any, list[torch.Tensor]]:
    """Routed experts whose second projection has so many columns, of 16."""

    def code(x: Any, index: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        return INVENTORY.spellings("experts_silu")["counted_as_floats"].function(x, index, weights, gate_up, down)

    index = torch.tensor([[0, 1], [2, 1], [2, 0], [1, 0]])
    return code, [rand(4, 16), index, rand(4, 2), rand(3, 16, 16), rand(3, columns, 8)]


def test_experts_that_give_other_columns_than_they_take() -> None:
    code, inputs = experts(16)
    check_pass(code, inputs, {"experts_silu": 1}, only=["experts_silu"])
    code, inputs = experts(8)
    refused = {"experts_silu": r"down_proj is \[3, 8, 8\], not \[E, hidden, inner\]"}
    check_pass(code, inputs, {}, left=None, only=["experts_silu"], refused=refused)


def test_tokens_without_experts_are_no_rows_of_the_result() -> None:
    code, (x, index, weights, *matrices) = experts(16)
    given = [x, index[:3], weights[:3], *matrices]
    refused = {"experts_silu": r"top_k_index is \[3, 2\], not \[tokens, K\]"}
    check_pass(code, given, {}, left=None, only=["experts_silu"], refused=refused)
