"""A rewritten model that fails, or is off, is told of by its own words and put back."""

from __future__ import annotations

import warnings
from typing import Any

import emit_modules
import pytest
import torch
from planted_kernels import Planter
from tiny_models import build

from tilegym_fx import kernelize
from tilegym_fx.apply import watch
from tilegym_fx.errors import ExportError, VerifyError
from tilegym_fx.judging import _dtype_of, wider_run
from tilegym_fx.verify import compare, is_out_of_memory, run_module

X = torch.linspace(-1, 1, 3 * emit_modules.WIDTH).reshape(3, -1)
pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
LAUNCH = "Failed to launch cuTile kernel: out of memory"
CALL = "padded prefill, which the original runs"


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Planter:
    return Planter(monkeypatch)


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (RuntimeError(LAUNCH), torch.OutOfMemoryError, f"runs out of memory in {CALL}: RuntimeError: {LAUNCH}"),
        (torch.OutOfMemoryError("CUDA full"), torch.OutOfMemoryError, f"runs out of memory in {CALL}: .*CUDA full"),
        (torch.AcceleratorError("CUDA error: out of memory", 2), torch.OutOfMemoryError, "runs out of memory"),
        (RuntimeError("an odd width"), VerifyError, f"does not run in {CALL}: RuntimeError: an odd width"),
    ],
    ids=["launch", "allocation", "accelerator", "other"],
)
def test_a_kernel_that_fails_where_the_original_runs_is_told_in_its_own_words(
    plant: Planter, error: BaseException, raised: type[BaseException], said: str
) -> None:
    """The masked attention is called in the padded prompt alone, where the original itself might have refused."""
    plant.failing("gqa_attention_masked", error)
    model = build("llama", torch.float32)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(raised, match=said) as told:
        kernelize(model)
    assert isinstance(told.value, VerifyError)
    assert told.value.__cause__ is error
    assert [type(module) for module in model.modules()] == classes


def test_memory_that_runs_out_is_told_from_other_failures() -> None:
    no_memory = (
        torch.OutOfMemoryError("full"), MemoryError(), RuntimeError(LAUNCH), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    )  # fmt: skip
    assert all(map(is_out_of_memory, no_memory))
    others = (RuntimeError("an odd width"), ValueError("out of memory"), RuntimeError("CUDA error: illegal access"))
    assert not any(map(is_out_of_memory, others))


def test_a_wider_run_without_memory_is_no_fault_of_the_code() -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError(LAUNCH)

    assert wider_run(emit_modules.Norm(), full).why_not == "a run of it in torch.float64 needs more memory than is free"


class Pair(torch.nn.Module):
    """Two modules to put something on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = emit_modules.Norm(), emit_modules.Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("within", [False, True])
def test_a_model_that_is_half_rewritten_is_put_back(
    monkeypatch: pytest.MonkeyPatch, verify: bool, problem: type[BaseException], within: bool
) -> None:
    """Between two modules, and within the second one."""
    bind, bound = watch.bind, []

    def stopped(module: torch.nn.Module, *rest: Any) -> None:
        if within or not bound:
            bind(module, *rest)
        bound.append(module)
        if len(bound) == 2:
            raise problem

    monkeypatch.setattr(watch, "bind", stopped)
    model = Pair()
    classes = [type(module) for module in model.modules()]
    with pytest.raises((problem, VerifyError)):
        kernelize(model, inputs=X, verify=verify)
    assert len(bound) == 2
    assert [type(module) for module in model.modules()] == classes


class GivingNothing(emit_modules.WithNorm):
    """Gives so many rows of its result, or keeps it all."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("kept", torch.zeros_like(X))

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        normed = self.norm(x)
        if self.rows is not None:
            return normed[: self.rows]
        self.kept.copy_(normed)
        return None


@pytest.mark.parametrize("rows", [None, 0, 1])
def test_where_nothing_is_compared_is_told_so(rows: int | None) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kernelize(GivingNothing(rows), inputs=X, strict=True)
    said = [warning for warning in told if "GivingNothing: nothing could be compared" in str(warning.message)]
    assert [warning.filename for warning in said] == ([] if rows else [__file__])


class Flaky(emit_modules.WithNorm):
    """Runs so many times."""

    left = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            Flaky.left -= 1
            if Flaky.left < 0:
                raise RuntimeError("the database went away")
        return self.norm(x)


def test_a_model_that_runs_once_and_not_again_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flaky, "left", 1)
    with pytest.raises(ExportError, match="Flaky runs once, and not again: call fails: RuntimeError: the database"):
        kernelize(Flaky(), inputs=X, strict=True)


def test_outputs_are_kept_where_they_are_and_are_the_callers_no_more() -> None:
    kept = torch.ones(2, 3, dtype=torch.bfloat16)
    outputs = run_module(Giving(kept), (), {})["call"]
    kept.zero_()
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(outputs[0], torch.ones(2, 3, dtype=torch.bfloat16))


class Giving(torch.nn.Module):
    """Gives a tensor that it keeps."""

    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.kept = kept

    def forward(self) -> torch.Tensor:
        return self.kept


def test_large_outputs_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As whole ones are: the largest of anything may lie in another part than the error."""
    before, wide = torch.randn(3, 50), torch.randn(3, 50, dtype=torch.float64)
    after = before.clone()
    after[2, 40] += 3.0
    before[0, 7] = after[0, 7] = torch.inf
    whole = compare({"call": [before]}, {"call": [after]}, {"call": [wide]}, torch.float32)
    monkeypatch.setattr("tilegym_fx.verify._AT_A_TIME", 16)
    assert compare({"call": [before]}, {"call": [after]}, {"call": [wide]}, torch.float32) == whole
    known = torch.isfinite(before)
    assert whole[0].error == float((after.double() - wide)[known].abs().max())


def of_parameters(*values: torch.Tensor) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.nn.Parameter(value, requires_grad=False) for value in values])


def test_a_model_is_in_the_dtype_of_most_of_its_parameters() -> None:
    """The first one may be a gain in float32 or codes in float8."""
    gain, weight, bias = torch.ones(1), torch.ones(8, dtype=torch.bfloat16), torch.ones(7, dtype=torch.float16)
    codes = torch.ones(99).to(torch.float8_e5m2)
    assert _dtype_of(of_parameters(gain, weight, bias)) == torch.bfloat16
    assert _dtype_of(of_parameters(codes, gain)) == torch.float32
    assert _dtype_of(of_parameters(weight[:1], gain)) == torch.float32
    assert _dtype_of(of_parameters(gain, bias, bias.clone(), weight)) == torch.float16
    assert _dtype_of(of_parameters(codes, torch.ones(9, dtype=torch.long))) == torch.float32
