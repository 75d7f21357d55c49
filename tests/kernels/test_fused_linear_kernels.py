"""Linear layers fused with norm, gate and each other, against float64: interpreter and, marked gpu, a GPU."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import Launch, recorded

GATED = (
    "linear_silu_mul", "linear_gelu_tanh_mul", "linear_silu_mul_packed", "rms_norm_linear_silu_mul",
    "rms_norm_linear_silu_mul_packed", "rms_norm_plus_one_linear_gelu_tanh_mul",
)  # fmt: skip
PROJECTED = (
    "linear_qkv", "linear_qkv_bias", "rms_norm_linear", "rms_norm_linear_qkv", "rms_norm_linear_qkv_bias",
    "rms_norm_plus_one_linear_qkv",
)  # fmt: skip
NAMES = (*GATED, *PROJECTED)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One row and few and many; K with and without a rest; features that fill no tile and several.
SIZES = (
    {"N": 1, "K": 256, "I": 40, "Q": 96, "M": 24}, {"N": 1, "K": 130, "I": 33, "Q": 33, "M": 33},
    {"N": 5, "K": 200, "I": 70, "Q": 40, "M": 8}, {"N": 20, "K": 64, "I": 130, "Q": 66, "M": 33},
    {"N": 50, "K": 96, "I": 24, "Q": 48, "M": 48}, {"N": 70, "K": 64, "I": 40, "Q": 64, "M": 16},
)  # fmt: skip
#: Sizes of Llama-3.1-8B, Qwen3-4B, SmolLM2-135M.
MODELS = (
    {"K": 4096, "I": 14336, "Q": 4096, "M": 1024}, {"K": 2560, "I": 9728, "Q": 4096, "M": 1024},
    {"K": 576, "I": 1536, "Q": 576, "M": 192},
)  # fmt: skip


@pytest.fixture(scope="module")
def gated() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("linear_silu_mul").__module__]


@pytest.fixture(scope="module")
def projected() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("linear_qkv").__module__]


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> Any:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        result = INVENTORY.entry_point(name)(**moved)
        results = result if isinstance(result, tuple) else (result,)
        assert all(r.is_contiguous() for r in results)
        return tuple(r.cpu() for r in results)

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_kind_of_shape(name: str, dtype: torch.dtype, device: str) -> None:
    for sizes in SIZES:
        for rows in ROWS if sizes["N"] == 5 else ("ordinary",):
            inputs = make_inputs(name, dtype, rows, "as trained", sizes)
            assert worst(on(device, name), name, inputs, dtype) <= 1, (sizes, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 200])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_the_sizes_of_models(name: str, rows: int) -> None:
    for sizes in MODELS:
        inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {**sizes, "N": rows})
        assert worst(on("cuda", name), name, inputs, torch.bfloat16) <= 1, sizes


@pytest.mark.parametrize("name", NAMES)
def test_any_leading_shape_and_strides(name: str) -> None:
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"N": 6, "K": 64})
    rows = next(iter(inputs))
    expected = on("cpu", name)(**inputs)
    wide = torch.zeros(2, 3, 70, dtype=torch.bfloat16)
    wide[..., 3:67] = inputs[rows].view(2, 3, 64)
    for got, right in zip(
        on("cpu", name)(**{**inputs, rows: wide[..., 3:67]}), expected, strict=True
    ):  # fmt: skip
        assert torch.equal(got, right.view(2, 3, -1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_decode_step_is_one_launch_and_several_rows_are_normed_before(name: str, rows: int) -> None:
    launches = [launch.kernel._pyfunc.__name__ for launch in launches_of(name, torch.bfloat16, {"N": rows, "K": 64})]
    norms = ["rms_norm_kernel"] if rows > 1 and name.startswith("rms_norm") else []
    assert launches[:-1] == norms


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("linear_qkv", ["linear_gemm_kernel"] * 3),
        ("rms_norm_linear", ["rms_norm_kernel", "linear_gemm_kernel"]),
        ("rms_norm_linear_qkv_bias", ["rms_norm_kernel", *["linear_gemm_kernel"] * 3]),
        ("rms_norm_linear_silu_mul", ["rms_norm_kernel", *["linear_gemm_kernel"] * 2]),
    ],
)
def test_many_rows_are_normed_once_and_fill_the_gpu_with_each_product(name: str, kernels: list[str]) -> None:
    launches = launches_of(name, torch.bfloat16, {"N": 4096, "K": 4096, "Q": 4096, "M": 1024, "I": 14336})
    assert [launch.kernel._pyfunc.__name__ for launch in launches] == kernels


def unlike(results: Any, value: float = math.nan) -> list[torch.Tensor]:
    """Tensors like these in which nothing has been written yet."""
    return [torch.full_like(result, value) for result in results]


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_weights_may_be_the_left_operands(gated: ModuleType, projected: ModuleType, rows: int) -> None:
    """Tiles that stick out on every side, in either layout of the weights."""
    torch.manual_seed(rows)
    x, wide, narrow = torch.randn(rows, 70), torch.randn(100, 70), torch.randn(30, 70)
    expected = torch.nn.functional.silu(x @ wide.t()) * (x @ wide.t())
    usual, turned = gated.Tiling(16, 32, 32, 1), gated.Tiling(8, 64, 32, 1, swap=True)
    for tiling in (usual, turned):
        for weight in (wide, wide.t().contiguous().t()):
            (out,) = unlike([expected])
            gated.run_gated(x, None, weight, weight, out, gated.SILU, tiling)
            torch.testing.assert_close(out, expected)
        outs = unlike([x @ weight.t() for weight in (wide, narrow, narrow)])
        projected.run_qkv(x, None, (wide, narrow, narrow), None, outs, tiling)
        for out, weight in zip(outs, (wide, narrow, narrow), strict=True):
            torch.testing.assert_close(out, x @ weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 32])
def test_weights_as_left_operands_are_right_on_a_gpu(gated: ModuleType, projected: ModuleType, rows: int) -> None:
    x, gate, up = (torch.randn(n, 1000, device="cuda", dtype=torch.bfloat16) for n in (rows, 700, 700))
    usual, turned = gated.Tiling(16, 32, 128, 2), gated.Tiling(rows, 64, 128, 2, swap=True)
    for run in (
        lambda outs, tiling: gated.run_gated(x, None, gate, up, outs[0], gated.SILU, tiling),
        lambda outs, tiling: projected.run_qkv(x, None, (gate, up, up), None, outs, tiling),
    ):
        expected, outs = (unlike([torch.empty_like(x[:, :700])] * 3, 0.0) for _ in range(2))
        run(expected, usual)
        run(outs, turned)
        torch.testing.assert_close(outs, expected)


@pytest.mark.gpu
def test_the_gate_of_many_rows_is_right_on_a_gpu(gated: ModuleType) -> None:
    x, gate, up = (torch.randn(n, 520, device="cuda", dtype=torch.bfloat16) for n in (2100, 4100, 4100))
    (expected,) = unlike([torch.empty(2100, 4100, device="cuda", dtype=torch.bfloat16)])
    gated.run_gated(x, None, gate, up, expected, gated.SILU, gated.Tiling(128, 128, 64, 1, 8))
    with recorded() as launches:
        gated.linear_silu_mul(x, gate, up)
    assert [launch.kernel._pyfunc.__name__ for launch in launches] == ["linear_gemm_kernel"] * 2
    torch.testing.assert_close(gated.linear_silu_mul(x, gate, up), expected)


def test_weights_are_not_copied(gated: ModuleType) -> None:
    weight = torch.randn(80, 64)
    with recorded() as launches:
        gated.linear_silu_mul_packed(torch.randn(1, 64), weight)
    arrays = [a.data_ptr() for a in launches[0].args if isinstance(a, torch.Tensor)]
    assert {weight.data_ptr(), weight[40:].data_ptr()} <= set(arrays)


def test_weights_of_different_layouts_are_projected_apart(projected: ModuleType) -> None:
    x, q, k = torch.randn(2, 64), torch.randn(40, 64), torch.randn(64, 40).t()
    with recorded() as launches:
        projected.linear_qkv(x, q, k, q)
    assert len(launches) == 3
    for got, weight in zip(projected.linear_qkv(x, q, k, q), (q, k, q), strict=True):
        torch.testing.assert_close(got, x @ weight.t())


def test_no_rows_launch_nothing(projected: ModuleType, gated: ModuleType) -> None:
    x, weight = torch.randn(0, 7, 64), torch.randn(40, 64)
    with recorded() as launches:
        assert gated.linear_silu_mul(x, weight, weight).shape == (0, 7, 40)
        assert projected.linear_qkv(x, weight, weight, weight)[1].shape == (0, 7, 40)
    assert launches == []


@pytest.mark.parametrize("rows", [1, 9])
def test_what_lies_beyond_a_row_is_never_multiplied(gated: ModuleType, rows: int) -> None:
    memory = torch.full((80, 256), math.nan, dtype=torch.bfloat16)
    memory[:, :200] = 1
    weight = memory[:70, :200]
    out = gated.rms_norm_linear_silu_mul(memory[:rows, :200], memory[0, :200], 0.0, weight, weight)
    assert torch.allclose(out.float(), torch.tensor(200.0 * 200.0), rtol=2**-7)


def launches_of(name: str, dtype: torch.dtype, sizes: dict[str, int]) -> list[Launch]:
    definition = INVENTORY.definitions[name]
    axes = {"N": 1, "K": 64, "I": 40, "Q": 96, "M": 32, **sizes}
    axes["I2"] = 2 * axes["I"]
    inputs: list[Any] = [
        1e-6 if spec.shape is None else torch.empty([axes[a] for a in spec.shape], dtype=dtype, device="meta")
        for spec in definition.inputs.values()
    ]
    with recorded() as launches:
        INVENTORY.entry_point(name)(*inputs)
    return launches


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch: str) -> None:
    """Every Definition; counts of rows, dtypes and sizes of models take turns."""
    turn = ARCHITECTURES.index(arch)
    for place, name in enumerate(NAMES, turn):
        rows = (1, 8, 32, 64, 2048)[place % 5]
        dtype = DTYPES[place % 3] if rows <= 8 else torch.bfloat16
        launches = launches_of(name, dtype, {**MODELS[place % 3], "N": rows})
        assert compile_kernel(launches[-1].kernel, launches[-1].args, arch)
