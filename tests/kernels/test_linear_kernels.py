"""linear, linear_bias and linear_add against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from exact import EXACT, Rounding

from tilegym_fx import inventory
from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("linear", "linear_bias", "linear_add")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Leading shape, K, M: one row and few and many rows, K with a rest beside every depth, M with a rest beside
#: every width, K large against M so that it is split.
SHAPES = (
    ((1,), 576, 100), ((1, 1), 2880, 33), ((1,), 64, 50257), ((3,), 130, 65), ((2, 8), 2048, 40),
    ((17,), 4544, 72), ((1, 40), 96, 200), ((2, 2, 33), 300, 130), ((130,), 64, 300),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[inventory.load().entry_point("linear").__module__]


Operands = dict[str, torch.Tensor]


def operands(name: str, lead: tuple[int, ...], depth: int, features: int, dtype: torch.dtype) -> Operands:
    torch.manual_seed(features)
    made = {
        "input": torch.randn(*lead, depth, dtype=dtype),
        "weight": (torch.randn(features, depth) / math.sqrt(depth)).to(dtype),
    }
    if name == "linear_bias":
        made["bias"] = torch.randn(features, dtype=dtype)
    if name == "linear_add":
        made["residual"] = torch.randn(*lead, features, dtype=dtype)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["linear_fp32", "linear_fp32_weight"])
def test_sums_that_are_not_rounded(kernels, name, dtype, device):
    for lead, depth, features in SHAPES[:6]:
        values = operands(name, lead, depth, features, dtype)
        if name == "linear_fp32_weight":
            values["weight"] = values["weight"].float() * 1.001
        got = getattr(kernels, name)(**{key: value.to(device) for key, value in values.items()}).cpu()
        wide = {key: value.double() for key, value in values.items()}
        ((right, tolerance),) = EXACT[name](Rounding.of(dtype), name, **wide)
        assert got.dtype == torch.float32
        assert got.shape == right.shape
        assert ((got.double() - right).abs() <= tolerance).all()


def check(function: Any, name: str, values: Operands, device: str) -> torch.Tensor:
    """Runs the kernel, compares with float64 within the Definition's rounding, returns the result."""
    got = function(**{key: value.to(device) for key, value in values.items()})
    dtype = torch.promote_types(values["input"].dtype, values.get("residual", values["input"]).dtype)
    rounding = Rounding.of(values["input"].dtype)
    ((right, tolerance),) = EXACT[name](rounding, name, **{k: v.double() for k, v in values.items()})
    assert got.shape == right.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert ((got.cpu().double() - right).abs() <= tolerance).all()
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_at_every_kind_of_shape(kernels, name, dtype, device):
    for lead, depth, features in SHAPES:
        check(getattr(kernels, name), name, operands(name, lead, depth, features, dtype), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 32, 200, 2048])
def test_equals_the_definition_at_the_sizes_of_models(kernels, rows, dtype):
    for depth, features in ((4096, 1024), (4096, 14336), (14336, 4096), (3584, 18944), (768, 50257)):
        values = operands("linear_add", (rows,), depth, features, dtype)
        check(kernels.linear_add, "linear_add", values, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_strides_are_taken_as_they_are(kernels, rows, device):
    values = operands("linear", (rows,), 200, 96, torch.bfloat16)
    contiguous = check(kernels.linear, "linear", values, device)
    x, weight = values["input"].to(device), values["weight"].to(device)
    wide = torch.zeros(rows, 3, 203, dtype=x.dtype, device=device)
    wide[:, 1, :200] = x
    column_major = weight.t().contiguous().t()
    padded = torch.zeros(96, 205, dtype=x.dtype, device=device)
    padded[:, 3:203] = weight
    strided = torch.zeros(96, 400, dtype=x.dtype, device=device)
    strided[:, ::2] = weight
    for view, layout in (
        (wide[:, 1, :200], weight), (x.t().contiguous().t(), weight),
        (x, column_major), (x, padded[:, 3:203]), (x, strided[:, ::2]),
    ):  # fmt: skip
        torch.testing.assert_close(kernels.linear(view, layout), contiguous, rtol=2**-7, atol=2**-8)


def test_a_column_major_weight_is_not_copied(kernels):
    weight = torch.randn(64, 96).t()
    with recorded() as launches:
        kernels.linear(torch.randn(4, 64), weight)
    assert launches[0].args[1].data_ptr() == weight.data_ptr()


def test_the_residual_may_be_wider_than_the_product(kernels):
    values = operands("linear_add", (3,), 64, 40, torch.bfloat16)
    values["residual"] = values["residual"].float() + 2**-12
    check(kernels.linear_add, "linear_add", values, "cpu")


def test_a_residual_of_one_row_reaches_every_row(kernels):
    values = operands("linear_add", (2, 3), 64, 40, torch.float32)
    one = values["residual"][:1, :1]
    expected = kernels.linear_add(values["input"], values["weight"], one.expand(2, 3, 40).contiguous())
    assert torch.equal(kernels.linear_add(values["input"], values["weight"], one), expected)


def test_no_rows_give_no_rows(kernels):
    with recorded() as launches:
        out = kernels.linear(torch.randn(0, 7, 64), torch.randn(40, 64))
    assert out.shape == (0, 7, 40)
    assert launches == []


def test_what_lies_beyond_a_row_is_never_multiplied(kernels):
    memory = torch.full((80, 256), math.nan, dtype=torch.bfloat16)
    memory[:, :200] = 1
    for rows in (1, 9, 80):
        out = kernels.linear(memory[:rows, :200], memory[:70, :200])
        assert (out == 200).all()


def test_one_rounding_even_where_the_sum_cancels(kernels):
    values = operands("linear_add", (4,), 256, 32, torch.bfloat16)
    product = values["input"].double() @ values["weight"].double().t()
    values["residual"] = -product.to(torch.bfloat16)
    out = kernels.linear_add(**values).double()
    exact = product + values["residual"].double()
    assert ((out - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def test_a_split_product_covers_all_of_k_and_leaves_no_part_empty(kernels):
    split = 0
    for rows in (2, 16, 32, 64, 200, 600):
        for features in (64, 1024, 4096, 14336):
            for depth in (64, 576, 2880, 4544, 14336):
                tiling = kernels.choose_tiling(rows, features, depth)
                steps = -(-depth // tiling.depth)
                share = -(-steps // tiling.split)
                assert (tiling.split - 1) * share < steps
                split += tiling.split > 1
    assert split > 10


@pytest.mark.parametrize(
    ("rows", "features", "depth", "split"),
    [(1, 1024, 4096, False), (8, 1024, 4096, True), (8, 128256, 4096, False), (2048, 4096, 14336, False)],
)
def test_k_is_split_only_where_tiles_are_too_few_for_the_gpu(kernels, rows, features, depth, split):
    assert (kernels.choose_tiling(rows, features, depth).split > 1) == split


def filled(kernels: ModuleType, name: str, values: Operands, tiling: Any) -> torch.Tensor:
    """What a tiling makes of y, which is NaN wherever no block has stored a tile."""
    x, weight, *extra = values.values()
    epilogue = (kernels.NOTHING, kernels.BIAS, kernels.RESIDUAL)[NAMES.index(name)]
    y = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    kernels.run_tiling(x, weight, extra[0] if extra else None, y, epilogue, tiling)
    return y


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("processors", [1, 5, 500])
@pytest.mark.parametrize("name", NAMES)
def test_a_persistent_block_computes_tile_after_tile(kernels, monkeypatch, name, processors, split):
    """With fewer blocks than the 60 tiles, a number that does not divide them, and more: the same bits."""
    monkeypatch.setattr(kernels, "processor_count", lambda device: processors)
    values = operands(name, (150,), 130, 90, torch.bfloat16)
    tiling = kernels.Tiling(16, 16, 32, split=split)
    walking = dataclasses.replace(tiling, persistent=True)
    with recorded() as launches:
        filled(kernels, name, values, walking)
    assert launches[0].grid == (min(60, max(1, processors // split)), split)
    expected = filled(kernels, name, values, tiling)
    assert not expected.isnan().any()
    assert torch.equal(filled(kernels, name, values, walking), expected)


@pytest.mark.parametrize("rows", [1, 5, 8, 40])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_weight_may_be_the_left_operand(kernels, name, split, rows):
    """Tiles that stick out on every side, in either layout of the weight."""
    values = operands(name, (rows,), 130, 90, torch.float32)
    expected = filled(kernels, name, values, kernels.Tiling(16, 16, 32))
    tiling = kernels.Tiling(8, 64, 32, split=split, swap=True)
    for weight in (values["weight"], values["weight"].t().contiguous().t()):
        torch.testing.assert_close(filled(kernels, name, {**values, "weight": weight}, tiling), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["SILU", "GELU_TANH"])
def test_a_gate_opens_what_a_product_gives(kernels, kind, dtype):
    """The same as the product, rounded, and then the activation of its own."""
    gated = sys.modules[inventory.load().entry_point("silu_mul").__module__]
    code = getattr(gated, kind)
    x, weight, gate = operands("linear_add", (21,), 70, 50, dtype).values()
    y = torch.full_like(gate, torch.nan)
    tiling = kernels.Tiling(16, 16, 32)
    kernels.run_tiling(x, weight, gate, y, kernels.GATE + code, tiling)
    up = torch.full_like(gate, torch.nan)
    kernels.run_tiling(x, weight, None, up, kernels.NOTHING, tiling)
    assert torch.equal(y, gated._gated(gate, up, code))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_weight_as_the_left_operand_is_right_on_a_gpu(kernels, name, rows):
    values = {key: value.cuda() for key, value in operands(name, (rows,), 700, 1500, torch.bfloat16).items()}
    expected = filled(kernels, name, values, kernels.Tiling(16, 32, 128, 2))
    for split in (1, 2):
        tiling = kernels.Tiling(max(8, rows), 64, 128, 2, split=split, swap=True)
        torch.testing.assert_close(filled(kernels, name, values, tiling), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_persistent_kernel_gives_the_same_bits_on_a_gpu(kernels, name):
    values = {key: value.cuda() for key, value in operands(name, (2100,), 600, 4100, torch.bfloat16).items()}
    tiling = kernels.Tiling(256, 128, 64, worker_warps=8)
    walking = dataclasses.replace(tiling, persistent=True)
    assert torch.equal(filled(kernels, name, values, walking), filled(kernels, name, values, tiling))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_persistent_tilings_compile_for_every_architecture(kernels, arch):
    name = NAMES[ARCHITECTURES.index(arch) % 3]
    values = {key: value.to("meta") for key, value in operands(name, (400,), 256, 400, torch.bfloat16).items()}
    tilings = [kernels.Tiling(**found) for found in kernels.CANDIDATES["linear"]((512, 400, 256, True))]
    with recorded() as launches:
        for tiling in tilings:
            if tiling.persistent:
                filled(kernels, name, values, tiling)
    assert launches
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)


#: dtype, rows, K, M: every tiling that the sizes of models lead to.
COMPILED = (
    *((torch.bfloat16, *sizes) for sizes in (
        (1, 4096, 1024), (1, 4096, 14336), (1, 14336, 4096), (1, 4096, 128256), (8, 14336, 4096),
        (32, 4096, 128256), (64, 4096, 1024), (512, 4096, 1024), (2048, 4096, 14336), (8, 768, 50257),
    )),
    *((torch.float32, *sizes) for sizes in ((1, 4096, 1024), (8, 4096, 14336), (512, 4096, 1024))),
)  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels, arch):
    """Epilogues and layouts of the weight take turns."""
    seen = set()
    for index, (dtype, rows, depth, features) in enumerate(COMPILED):
        name = NAMES[index % 3]
        make = {"dtype": dtype, "device": "meta"}
        weight = torch.empty(features, depth, **make)
        weight = weight if index % 2 else torch.empty(depth, features, **make).t()
        extra = {"linear_bias": [(features,)], "linear_add": [(rows, features)]}.get(name, [])
        with recorded() as launches:
            arguments = [torch.empty(rows, depth, **make), weight, *(torch.empty(e, **make) for e in extra)]
            getattr(kernels, name)(*arguments)
        for launch in launches:
            constants = tuple(a for a in launch.args if not isinstance(a, torch.Tensor))
            if (dtype, launch.kernel, constants) not in seen:
                seen.add((dtype, launch.kernel, constants))
                assert compile_kernel(launch.kernel, launch.args, arch)
    assert len(seen) >= len(COMPILED)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_operands_of_two_widths_compile_for_every_architecture(kernels, arch):
    rows = (1, 40)[ARCHITECTURES.index(arch) % 2]
    x = torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        kernels.linear_fp32_weight(x, torch.empty(128, 2048, device="meta"))
        kernels.linear_fp32(x, torch.empty(128, 2048, dtype=torch.bfloat16, device="meta"))
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)
