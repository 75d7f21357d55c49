"""What `python -m tilegym_fx.tune` may choose: every candidate computes what the Definition says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilegym_fx import inventory, tuning
from tilegym_fx.tune import OpCall, TensorSpec, candidates, questions, relative_error

INVENTORY = inventory.load()
BF16 = torch.bfloat16


def tensor(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape).stride(), BF16)


def call(definition: str, *arguments: Any) -> OpCall:
    return OpCall(definition, INVENTORY.solutions_for(definition)[0].name, arguments)


def calls() -> Iterator[OpCall]:
    for rows in (1, 9, 30, 60, 100):
        x, weight = tensor(rows, 160), tensor(72, 160)
        yield call("linear", x, weight)
        yield call("linear_silu_mul", x, weight, weight)
        yield call("linear_qkv", x, weight, tensor(24, 160), tensor(24, 160))
    yield call("rms_norm_linear", tensor(1, 160), tensor(160), 1e-6, tensor(72, 160))
    heads = tensor(1, 2, 70, 32), tensor(1, 2, 70, 32)
    yield call("gqa_attention_causal", tensor(1, 4, 70, 32), *heads, 0.2)
    yield call("gqa_attention", tensor(1, 4, 1, 32), *heads, 0.2)


@pytest.mark.parametrize("op_call", list(calls()), ids=str)
def test_a_kernel_asks_and_each_answer_is_right(op_call: OpCall) -> None:
    torch.manual_seed(0)
    entry = INVENTORY.entry_point(op_call.solution)
    arguments = op_call.make("cpu")
    expected = INVENTORY.reference(op_call.definition)(*arguments)
    asked = [key for key in questions(entry, op_call, "cpu", tuning.NO_GPU) if candidates(entry, key)]
    assert asked
    for key in asked:
        for config in candidates(entry, key):
            with tuning.recording(tuning.NO_GPU, {key: config}):
                assert relative_error(entry(*arguments), expected) < 1e-2, config


def test_the_shipped_table_answers_with_what_its_kernels_take() -> None:
    listed = {}
    for solution in INVENTORY.solutions.values():
        listed.update(INVENTORY.entry_point(solution.name).__globals__.get("CANDIDATES", {}))
    found = tuning.entries(tuning.shipped_file("sm_90"))
    assert found
    for entry in found:
        options = listed[entry.kernel]
        fields = set((options(entry.shape_class) if callable(options) else options)[0])
        assert entry.config is None or set(entry.config) == fields
        assert entry.microseconds <= entry.default_microseconds
