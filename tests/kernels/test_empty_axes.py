"""Every kernel with each of its axes empty: what the reference gives, and no memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from inputs import INDEXED, INVENTORY, NARROW, make_inputs

from tilegym_fx.errors import TilegymFxError
from tilegym_fx.kernel_check import difference
from tilegym_fx.pattern import forms_of

#: What a kernel may raise where its reference raises too: such a place is never matched.
REFUSALS = (ArithmeticError, RuntimeError, ValueError, IndexError, TilegymFxError)
#: With few pairs the reference, too, keeps the order of those of one expert.
SIZES = {"experts_rows": {"K": 1}}


def empty_axes() -> Iterator[tuple[str, str]]:
    """Definition and axis, for every variable axis of an input that may be empty."""
    for name, definition in INVENTORY.definitions.items():
        shapes = {key: spec.shape for key, spec in definition.inputs.items() if spec.shape is not None}
        for axis in dict.fromkeys(a for shape in shapes.values() for a in shape):
            indexed = (key for key in shapes if INDEXED.get(key) == axis and axis not in shapes[key])
            if definition.axes[axis].type == "var" and not any(indexed):  # an index into nothing is of no use
                yield name, axis


@pytest.fixture(autouse=True)
def unwritten_memory_is_seen() -> Iterator[None]:
    """What is allocated and not written holds NaN, or the largest number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    return make_inputs(name, torch.bfloat16 if name in NARROW else torch.float32, "ordinary", "as trained", sizes)


@pytest.mark.parametrize(("name", "axis"), list(empty_axes()))
def test_an_empty_axis(name: str, axis: str) -> None:
    sizes = {**SIZES.get(name, {}), axis: 0}
    if f"D == 2 * {axis}" in INVENTORY.definitions[name].constraints:
        sizes["D"] = 0
    inputs = inputs_of(name, sizes)
    kernel = INVENTORY.entry_point(INVENTORY.solutions_for(name)[0].name)
    said = next((said for guard in next(forms_of(INVENTORY, name)).guards if (said := guard(**inputs))), None)
    try:
        with torch.no_grad():
            INVENTORY.reference(name)(**inputs)
    except REFUSALS:
        return  # no trace, and so no match
    if said is None:
        assert difference(INVENTORY.reference(name), kernel, inputs) == []


def test_axes_of_all_definitions_are_tried() -> None:
    tried = list(empty_axes())
    assert {name for name, _ in tried} == INVENTORY.definitions.keys()
    assert {("linear", "K"), ("rotary_embedding", "Hk"), ("gqa_attention_masked", "T")} <= set(tried)


@pytest.mark.parametrize(("extra", "value"), [("linear", 0.0), ("linear_bias", 3.0), ("linear_add", 3.0)])
def test_a_sum_of_nothing_is_what_is_added_to_it(extra: str, value: float) -> None:
    given = {"linear_bias": (torch.full((5,), 3.0),), "linear_add": (torch.full((2, 4, 5), 3.0),)}.get(extra, ())
    kernel = INVENTORY.entry_point(extra)
    assert torch.equal(kernel(torch.zeros(2, 4, 0), torch.zeros(5, 0), *given), torch.full((2, 4, 5), value))


def test_rows_that_there_are_not_are_left_out() -> None:
    weight = torch.arange(16.0).view(2, 1, 8)
    kernel = INVENTORY.entry_point("grouped_linear")
    for ends in ([1, 5], [5, 9], [0, 3]):
        got = kernel(torch.ones(3, 1), weight, torch.tensor(ends, dtype=torch.int32))
        assert torch.equal(got, weight[[int(row >= ends[0]) for row in range(3)], 0])


class TestExpertsThatThereAreNot:
    """Indices from the number of experts on, as of an expert on another machine."""

    INDEX = torch.tensor([[1, 4], [0, 3], [2, 1], [7, 0]])

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        hidden = torch.arange(12.0).view(4, 3)
        return INVENTORY.entry_point("experts_rows")(hidden, self.INDEX, count)

    def test_their_pairs_come_last_as_in_the_reference(self) -> None:
        hidden = torch.arange(12.0).view(4, 3)
        for count in (3, 4, 8):
            rows, order, ends = self.rows(count)
            _, _, wanted = INVENTORY.reference("experts_rows")(hidden, self.INDEX, count)
            assert torch.equal(ends, wanted)
            assert torch.equal(order.sort()[0], torch.arange(8))
            assert torch.equal(rows, hidden[order // 2])
            of_nobody = self.INDEX.view(-1)[order[int(ends[-1]) :]]
            assert (of_nobody >= count).all()

    def test_negative_ones_too(self) -> None:
        index = torch.tensor([[-1, 1], [0, -5]])
        _, order, ends = INVENTORY.entry_point("experts_rows")(torch.zeros(2, 3), index, 2)
        assert (order.tolist(), ends.tolist()) == ([2, 1, 0, 3], [1, 2])

    @pytest.mark.parametrize("name", ["experts_silu", "experts_silu_fp32", "experts_clamped"])
    def test_nothing_outside_is_read_or_written(self, name: str) -> None:
        inputs = inputs_of(name, {})
        inputs["top_k_index"][0, 0] = inputs["top_k_index"][1, 1] = 99
        result = INVENTORY.entry_point(name)(**inputs)
        assert result.shape == inputs["hidden_states"].shape
        assert result[2:].isfinite().all()
