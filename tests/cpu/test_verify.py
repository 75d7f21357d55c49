"""Calls of a model that are compared, and what counts as a difference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tilegym_fx import verify

INPUTS = {"input_ids": torch.zeros(1, 6, dtype=torch.long)}


class Speaker(nn.Module):
    """Gives zeros for every token, and refuses what it is told to refuse."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.refuses = refuses

    def forward(self, input_ids: Any, use_cache: bool, attention_mask: Any = None, past: Any = None) -> Any:
        kind = "padding" if attention_mask is not None else "step" if past else "prompt"
        if kind == self.refuses:
            raise RuntimeError(f"no {kind}")
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))


def run(model: nn.Module) -> verify.Outputs:
    return verify.run_language_model(model, INPUTS, lambda model, result: {"past": True}, steps=2)


def test_a_prompt_cached_steps_and_padding_are_run() -> None:
    assert list(run(Speaker())) == ["prefill", "decode 1", "decode 2", "padded prefill", "padded decode 1"]


@pytest.mark.parametrize(
    ("refuses", "calls"),
    [
        ("step", ["prefill", "padded prefill", "padded decode 1"]),
        ("padding", ["prefill", "decode 1", "decode 2"]),
    ],
)
def test_calls_end_where_the_model_itself_refuses_one(refuses: str, calls: list[str]) -> None:
    assert list(run(Speaker(refuses))) == calls


def test_the_prompt_must_run() -> None:
    with pytest.raises(RuntimeError, match="no prompt"):
        run(Speaker("prompt"))


def test_a_rewritten_model_that_refuses_more_than_the_original_does_not_pass() -> None:
    with pytest.raises(ValueError, match="decode 1"):
        verify.compare(run(Speaker()), run(Speaker("step")), None, torch.float32)


def test_a_value_that_is_off_by_more_than_rounding_does_not_pass() -> None:
    before = {"call": [torch.ones(3)]}
    after = {"call": [torch.tensor([1.0, 1.0, 1.001])]}
    assert not verify.compare(before, after, None, torch.float32)[0].passed
    assert verify.compare(before, after, None, torch.bfloat16)[0].passed


@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.float32], torch.float32),
        ([torch.float32], torch.float64),
        ([torch.float64], None),
        ([], None),
    ],
)
def test_a_model_is_judged_in_the_next_wider_dtype(dtypes: list[torch.dtype], wide: torch.dtype | None) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])
    assert verify.wider_dtype(model) == wide
    outputs = verify.wider_outputs(model, lambda m: {"call": [p.sum() for p in m]})
    assert (outputs is None) if wide is None else all(value.dtype == wide for value in outputs["call"])


def test_float32_may_be_as_far_from_float64_as_the_original_is() -> None:
    before, wide = {"call": [torch.tensor([1.0 + 1e-5])]}, {"call": [torch.ones(1, dtype=torch.float64)]}
    near, far = {"call": [torch.tensor([1.0 - 1.5e-5])]}, {"call": [torch.tensor([1.0 - 3e-5])]}
    assert verify.compare(before, near, wide, torch.float32)[0].passed
    assert not verify.compare(before, far, wide, torch.float32)[0].passed
    assert not verify.compare(before, near, {}, torch.float32)[0].passed  # no wider run of this call
