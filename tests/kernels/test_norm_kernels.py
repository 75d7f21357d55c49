"""The norm kernels against float64 and their references: interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

#: Those whose groups must divide a row have test_gated_norm.py.
NAMES = tuple(
    sorted(
        n
        for n, d in INVENTORY.definitions.items()
        if d.op_type in ("rmsnorm", "layernorm") and "groups" not in d.inputs
    )
)
#: One entry point for each of the five kernels.
KERNELS = ("rms_norm", "add_rms_norm_cast_last", "rms_norm_plus_one_add", "layer_norm", "add_layer_norm")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One chunk, several, one that is half empty, a size that no vector load divides, and hardly anything.
SIZES = ({"N": 3, "H": 576}, {"N": 2, "H": 2880}, {"N": 1, "H": 4544}, {"N": 5, "H": 517}, {"N": 2, "H": 1})


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("rms_norm").__module__]


def on(device: str, name: str) -> Any:
    """The entry point, with its tensors moved to the device and its results back."""

    def run(**inputs: Any) -> Any:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        result = INVENTORY.entry_point(name)(**moved)
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else result.cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_on_rows_of_every_magnitude(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS:
            inputs = make_inputs(name, dtype, rows, "as trained", sizes)
            assert worst(on(device, name), name, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_too_long_for_registers_agree_too(name, device):
    for hidden in (5 * 4096, 16385):
        inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"N": 2, "H": hidden})
        assert worst(on(device, name), name, inputs, torch.float32) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KERNELS)
def test_blocks_of_several_short_rows_agree_and_the_last_may_be_ragged(name, device, kernels):
    for rows in (1056, 1059):
        assert kernels.pick_tiles(rows, 1, 40)[0] > 1
        inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"N": rows, "H": 40})
        assert worst(on(device, name), name, inputs, torch.bfloat16) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_is_where_the_reference_has_it(name, device):
    """Sums in another order may move a value across a rounding boundary, but seldom."""
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"N": 16, "H": 1024})
    got, expected = on(device, name)(**inputs), INVENTORY.reference(name)(**inputs)
    for value, right in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        assert value.dtype == right.dtype
        assert (value.bfloat16() != right.bfloat16()).float().mean() < 2e-3  # a float32 result is one order of sums


def test_the_two_orders_of_cast_and_weight_are_told_apart():
    inputs = make_inputs("rms_norm", torch.bfloat16, "ordinary", "as trained", {"N": 16, "H": 1024})
    first, last = (INVENTORY.entry_point(n)(**inputs) for n in ("rms_norm", "rms_norm_cast_last"))
    assert (first != last).float().mean() > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_are_promoted_like_the_references(name, device):
    for x, residual, weight in (
        (torch.bfloat16, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float16, torch.bfloat16), (torch.float32, torch.float16, torch.float16),
    ):  # fmt: skip
        if "layer_norm" in name and weight != x:  # torch has only float32 weights beside a narrower input
            weight = torch.float32 if x != torch.float32 and residual != torch.float32 else x
        inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"N": 3, "H": 200})
        dtypes = {"hidden_states": x, "residual": residual, "weight": weight, "bias": weight}
        inputs = {k: v.to(dtypes[k]) if k in dtypes else v for k, v in inputs.items()}
        if "layer_norm" in name and "residual" in inputs:
            inputs["residual"] = inputs["residual"].to(x)
        expected = INVENTORY.reference(name)(**inputs)
        torch.testing.assert_close(on(device, name)(**inputs), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_the_one_that_torch_gives(device):
    for dtype in DTYPES:
        inputs = make_inputs("add_rms_norm", dtype, "ordinary", "as trained", {"N": 4, "H": 333})
        _, total = on(device, "add_rms_norm")(**inputs)
        assert torch.equal(total, inputs["residual"] + inputs["hidden_states"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_does_not_drown_the_variance(device):
    x = 1000 + torch.randn(4, 3000, dtype=torch.float64) / 64
    inputs = {"hidden_states": x.float(), "weight": torch.ones(3000), "bias": torch.zeros(3000), "eps": 1e-12}
    got = on(device, "layer_norm")(**inputs)
    expected = torch.nn.functional.layer_norm(x.float().double(), (3000,), eps=1e-12)
    assert (got.double() - expected).abs().max() < 5e-2
    assert (got.double().var(-1, unbiased=False) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_heads_inside_a_packed_projection_are_normed_in_place(device):
    qkv = torch.randn(2, 5, 12 * 64, dtype=torch.bfloat16, device=device)
    weight = torch.randn(64, dtype=torch.bfloat16, device=device)
    heads = qkv[..., 2 * 64 : 10 * 64].view(2, 5, 8, 64)
    norm = INVENTORY.entry_point("rms_norm")
    got = norm(heads, weight, 1e-6)
    assert got.is_contiguous()
    assert torch.equal(got, norm(heads.contiguous(), weight, 1e-6))


def test_strided_heads_are_not_copied():
    heads = torch.randn(2, 300, 12 * 64)[..., 128:640].view(2, 300, 8, 64)
    with recorded() as launches:
        INVENTORY.entry_point("add_rms_norm")(heads, torch.randn(2, 300, 8, 64), torch.randn(64), 1e-6)
    assert launches[0].args[0].data_ptr() == heads.data_ptr()
    assert launches[0].args[0].shape == (600, 8, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_that_no_view_can_express_are_copied(device):
    norm = INVENTORY.entry_point("rms_norm_add")
    x = torch.randn(3, 40, 4, 2, device=device).permute(2, 0, 3, 1)
    residual = torch.randn(1, 3, 1, 40, device=device).expand(4, 3, 2, 40)
    weight = torch.randn(80, device=device)[::2]
    expected = norm(x.contiguous(), residual.contiguous(), weight.contiguous(), 1e-6)
    assert torch.equal(norm(x, residual, weight, 1e-6), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_any_leading_shape_is_kept(device):
    norm = INVENTORY.entry_point("rms_norm")
    x, weight = torch.randn(2, 3, 4, 96, device=device), torch.randn(96, device=device)
    got = norm(x, weight, 1e-6)
    assert got.shape == x.shape
    assert torch.equal(norm(x[1, 2, 3], weight, 1e-6), got[1, 2, 3])


def test_no_rows_launch_nothing():
    with recorded() as launches:
        for name in NAMES:
            inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"N": 0, "H": 64})
            result = INVENTORY.entry_point(name)(**inputs)
            assert (result[0] if isinstance(result, tuple) else result).shape == (0, 64)
    assert launches == []


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_beyond_a_row_never_counts(device):
    memory = torch.full((6, 2048), math.nan, device=device)
    memory[:, :1500] = 2
    ones = torch.ones(1500, device=device)
    assert (INVENTORY.entry_point("rms_norm")(memory[:, :1500], ones, 0.0) - 1).abs().max() < 1e-6
    result = INVENTORY.entry_point("layer_norm")(memory[:, :1500], ones, 3 * ones, 1e-6)
    assert (result - 3).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_stays_in_its_row(device):
    x = torch.randn(1060, 33, device=device)
    x[7, 5] = math.nan
    rows = INVENTORY.entry_point("rms_norm")(x, torch.ones(33, device=device), 1e-6).isnan().any(-1)
    assert rows.nonzero().flatten().tolist() == [7]


def test_tiles_cover_the_rows_and_idle_few_lanes(kernels):
    for hidden in (16, 64, 80, 96, 128, 200, 256, 576, 896, 960, 1152, 2048, 2880, 4544, 8192, 14848, 50257):
        for outer, inner in ((1, 1), (7, 1), (32, 1), (4096, 1), (4096, 8), (1000, 28), (3, 71)):
            per_outer, per_inner, chunk, fits = kernels.pick_tiles(outer, inner, hidden)
            assert inner % per_inner == 0
            assert fits == (outer % per_outer == 0)
            lanes = -(-hidden // chunk) * chunk
            assert lanes <= hidden * 1.25 or lanes - hidden < 1024 <= hidden or lanes - hidden < 4096 <= hidden
            if outer * inner <= 264:
                assert per_outer * per_inner == 1


#: Whole chunks, a ragged one, several rows a block, heads, and a loop over a long row.
COMPILED = ((32, 4096), (3, 2880), (4100, 576), (4096, 8, 128), (2, 20000))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    """Shapes and dtypes take turns, in another order for each architecture."""
    for index, name in enumerate(KERNELS):
        turn = index + ARCHITECTURES.index(arch)
        *lead, hidden = COMPILED[turn % len(COMPILED)]
        make = {"dtype": DTYPES[turn % 3], "device": "meta"}
        specs = {key: spec for key, spec in INVENTORY.definitions[name].inputs.items() if key != "eps"}
        shapes = [(*(lead if len(spec.shape or ()) > 1 else ()), hidden) for spec in specs.values()]
        with recorded() as launches:
            INVENTORY.entry_point(name)(*(torch.empty(shape, **make) for shape in shapes), 1e-6)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
