"""Calls of a model that are compared, and what counts as a difference."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import emit_modules
import pytest
import torch
from planted_kernels import Planter
from torch import nn

from tilegym_fx import kernelize, live, report, verify
from tilegym_fx.errors import VerifyError

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


INF, NAN = torch.inf, torch.nan
OTHERS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "imaginary part": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    "imaginary part of a conjugate": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    "sign of an infinity": (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0])),
    "NaN for an infinity": (torch.tensor([-INF, 1.0]), torch.tensor([NAN, 1.0])),
    "infinity for a NaN": (torch.tensor([NAN, 1.0]), torch.tensor([INF, 1.0])),
    "near integers": (torch.tensor([1000, 7]), torch.tensor([1000, 8])),
    "integers that are one in float64": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    "bools": (torch.tensor([True, False]), torch.tensor([True, True])),
}


@pytest.mark.parametrize(("before", "after"), OTHERS.values(), ids=OTHERS)
def test_what_no_rounding_explains_does_not_pass(before: torch.Tensor, after: torch.Tensor) -> None:
    """In a dtype so coarse that a difference of floating-point numbers of that size would be one."""
    for wide in (None, {"call": [before]}):
        assert not verify.compare({"call": [before]}, {"call": [after]}, wide, torch.bfloat16)[0].passed
        assert verify.compare({"call": [before]}, {"call": [before.clone()]}, wide, torch.bfloat16)[0].passed


def test_where_the_wider_run_has_no_number_the_original_is_to_be_met() -> None:
    before, far = torch.tensor([1.0, INF]), torch.tensor([2.0, INF])
    for judge in (torch.tensor([NAN, 7e4]), torch.tensor([INF, -INF])):
        assert verify.compare({"call": [before]}, {"call": [before]}, {"call": [judge]}, torch.float32)[0].passed
        assert not verify.compare({"call": [before]}, {"call": [far]}, {"call": [judge]}, torch.float32)[0].passed


def test_an_output_of_another_dtype_does_not_pass() -> None:
    with pytest.raises(ValueError, match="call gives tensors of other dtypes than before"):
        verify.compare({"call": [torch.ones(3)]}, {"call": [torch.ones(3).double()]}, None, torch.float32)


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
    outputs, why_not = verify.wider_outputs(model, lambda m: {"call": [p.sum() for p in m]})
    assert bool(why_not) == (wide is None)
    assert (outputs is None) if wide is None else all(value.dtype == wide for value in outputs["call"])


def test_float32_may_be_as_far_from_float64_as_the_original_is() -> None:
    before, wide = {"call": [torch.tensor([1.0 + 1e-5])]}, {"call": [torch.ones(1, dtype=torch.float64)]}
    near, far = {"call": [torch.tensor([1.0 - 1.5e-5])]}, {"call": [torch.tensor([1.0 - 3e-5])]}
    assert verify.compare(before, near, wide, torch.float32)[0].passed
    assert not verify.compare(before, far, wide, torch.float32)[0].passed
    assert not verify.compare(before, near, {}, torch.float32)[0].passed  # no wider run of this call


class Noisy(nn.Module):
    """A norm, and noise from torch's generator or from one that torch does not know of."""

    def __init__(self, own: random.Random | None = None) -> None:
        super().__init__()
        self.norm = emit_modules.Norm()
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x) if self.own is None else torch.full_like(x, self.own.random())
        return self.norm(x) + noise


def call(model: nn.Module) -> verify.Outputs:
    return verify.run_module(model, (torch.ones(2, emit_modules.WIDTH),), {})


def test_runs_draw_the_same_numbers_and_leave_those_of_the_user() -> None:
    before = torch.get_rng_state()
    one, two = call(Noisy()), call(Noisy())
    assert torch.equal(torch.get_rng_state(), before)
    assert verify.apart(one, two, torch.float32) == []
    assert verify.apart(one, verify.with_other_numbers(Noisy(), call), torch.float32)


def test_a_model_that_is_unlike_itself_passes_no_check() -> None:
    model = Noisy(random.Random(0))
    found = verify.apart(call(model), call(model), torch.float32)
    assert [check.passed for check in found] == [False]
    assert "cannot be verified, as two runs of the original are" in str(found[0])


class Counting(nn.Module):
    """Counts its calls in memory of which a buffer is made by repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(4.0).view(1, 4, 1).expand(3, 4, 2))
        self.register_buffer("none", torch.arange(4).expand(0, 4))
        self.register_buffer("sparse", torch.eye(3).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ids[0, :, 0] += 1
        return x + self.ids.sum()


def test_a_buffer_of_repeated_memory_is_put_back() -> None:
    model = Counting()
    for _ in range(2):
        assert torch.equal(call(model)["call"][0], torch.full((2, emit_modules.WIDTH), 61.0))
    assert torch.equal(model.ids, torch.arange(4.0).view(1, 4, 1).expand(3, 4, 2))
    assert model.ids.stride() == (0, 1, 0)


class Leaving(nn.Module):
    """Leaves its result in the last tensor of those that it is given, or in none."""

    def __init__(self, leaves: bool = True) -> None:
        super().__init__()
        self.norm = emit_modules.Norm()
        self.leaves = leaves

    def forward(self, x: torch.Tensor, into: dict[str, torch.Tensor]) -> None:
        if self.leaves:
            into["y"].copy_(self.norm(x))


def left(model: nn.Module, y: torch.Tensor, of: verify.Outputs | None = None) -> verify.Outputs:
    return verify.run_module(model, (X,), {"into": {"x": X, "y": y}}, of=of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_what_a_module_leaves_in_its_inputs_is_compared(dtype: torch.dtype) -> None:
    y = torch.full_like(X, NAN).to(dtype)
    before, name = left(Leaving(), y), "input 2 after the call"
    assert list(before) == ["call", name]
    assert bool(y.to(torch.complex64).isnan().all())
    assert all(check.passed for check in verify.compare(before, left(Leaving(), y, before), None, torch.float32))
    none = left(Leaving(leaves=False), y, before)
    assert [check.call for check in verify.compare(before, none, None, torch.float32) if not check.passed] == [name]
    assert list(left(Leaving(leaves=False), y)) == ["call"]
    found = verify.compare({"call": []}, before, None, torch.float32)
    assert [str(check) for check in found if not check.passed] == [f"{name}: off by inf, 0 allowed"]


@pytest.mark.filterwarnings("ignore:tilegym_fx")
def test_a_wrong_result_in_an_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Planter(monkeypatch)
    inputs = {"x": X, "into": {"x": X, "y": torch.zeros_like(X)}}
    assert report(kernelize(Leaving(), inputs=inputs, strict=True)).counts() == {"rms_norm": 1}
    plant.changed("rms_norm", lambda value: value * 1.5)
    with pytest.raises(VerifyError, match="input 2 after the call: off by"):
        kernelize(Leaving(), inputs=inputs, strict=True)


X = torch.linspace(-1, 1, 3 * emit_modules.WIDTH).reshape(3, -1)


@pytest.mark.filterwarnings("ignore:tilegym_fx")
def test_a_wrong_kernel_in_a_random_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check.passed and check.error < 1e-4 for check in report(kernelize(Noisy(), inputs=X)).checks)
    binding = live.binding.apply

    def wrong(module: Any, model: Any) -> Any:
        binding(module, model)
        model.norm.weight.data += 0.5
        return model

    monkeypatch.setattr(live.binding, "apply", wrong)
    with pytest.raises(VerifyError, match="off by"):
        kernelize(Noisy(), inputs=X)


@pytest.mark.filterwarnings("ignore:tilegym_fx. no CUDA")
def test_a_model_that_cannot_be_verified_is_reported_so() -> None:
    with pytest.warns(UserWarning, match="cannot be verified"):
        model = kernelize(Noisy(random.Random(0)), inputs=X)
    assert not report(model).checks[0].passed
    assert "call: cannot be verified" in str(report(model))
