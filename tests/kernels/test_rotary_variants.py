"""The kernel for the other rotary embeddings against float64, through the interpreter and, marked gpu, on
a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

PAIRED = (
    "rotary_embedding_half_width", "rotary_embedding_interleaved", "rotary_embedding_interleaved_fp32",
    "rotary_embedding_interleaved_fp32_shared", "rotary_embedding_interleaved_partial",
    "rotary_embedding_pairs_to_halves", "rotary_embedding_pairs_to_halves_shared", "rotary_embedding_partial",
)  # fmt: skip
NAMES = (*PAIRED, "rotary_embedding_single", "rotary_embedding_complex")
BROADCAST = (
    "rotary_embedding_complex", "rotary_embedding_interleaved_partial", "rotary_embedding_pairs_to_halves_shared",
)  # fmt: skip
ROTARY = sorted(name for name in INVENTORY.definitions if "rotary_embedding" in name)
PARTIAL = tuple(name for name in NAMES if "partial" in name)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Heads that fill a tile and others, ragged groups of heads, single positions, few and all columns rotated.
SIZES = (
    {"D": 64, "R": 32, "Hq": 9, "Hk": 3, "H": 9}, {"D": 80, "R": 40, "Hq": 4, "Hk": 4, "S": 5, "H": 4},
    {"D": 96, "R": 48, "Hq": 3, "Hk": 1, "S": 1, "H": 3}, {"D": 256, "R": 128, "Hq": 9, "Hk": 1, "S": 3,
    "H": 9},
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point(NAMES[0]).__module__]


def on(device: str, name: str) -> Any:
    def run(**inputs: torch.Tensor) -> Any:
        result = INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()})
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else result.cpu()

    return run


def case(name: str, dtype: torch.dtype, rows: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Inputs of that size; the rotated part of a partial embedding is even, and a third of a head."""
    if name in PARTIAL:
        sizes = {**sizes, "R": max(2, sizes["D"] // 6 * 2)}
    return make_inputs(name, dtype, rows, "as trained", sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_kind_of_head(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS if sizes["D"] == 64 else ("ordinary",):
            assert worst(on(device, name), name, case(name, dtype, rows, sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_is_where_the_reference_has_it(name, dtype, device):
    inputs = case(name, dtype, "ordinary", {"D": 128, "R": 64, "S": 16})
    got, expected = on(device, name)(**inputs), INVENTORY.reference(name)(**inputs)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    assert all(torch.equal(value, right) for value, right in pairs)


@pytest.mark.parametrize("name", PAIRED)
def test_transposed_projections_are_read_in_place(name):
    inputs = case(name, torch.bfloat16, "ordinary", {"D": 64, "R": 32, "Hq": 6, "Hk": 2})
    views = {**inputs, **{k: inputs[k].transpose(1, 2).contiguous().transpose(1, 2) for k in ("q", "k")}}
    function = INVENTORY.entry_point(name)
    for got, expected in zip(function(**views), function(**inputs), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, expected)
    with recorded() as launches:
        function(**views)
    (launch,) = launches
    assert [a.data_ptr() for a in launch.args[:2]] == [views["q"].data_ptr(), views["k"].data_ptr()]


@pytest.mark.parametrize("positions", [9, 1])
@pytest.mark.parametrize("name", BROADCAST)
def test_positions_may_come_before_heads(name, positions):
    """Of one position and one key head nothing tells which is which."""
    for k_heads in (1, 3):
        inputs = case(name, torch.bfloat16, "ordinary", {"D": 64, "Hq": 6, "Hk": k_heads, "S": positions})
        other = {name: x.transpose(1, 2) for name, x in inputs.items()}
        function = INVENTORY.entry_point(name)
        for got, expected in zip(function(**other), function(**inputs), strict=True):
            assert got.is_contiguous()
            assert torch.equal(got.transpose(1, 2), expected)


TABLED = [name for name in ROTARY if "cos" in INVENTORY.definitions[name].inputs]


@pytest.mark.parametrize("name", TABLED)
def test_float32_tables_beside_narrow_heads(name):
    """The result has the dtype of the reference's, and its numbers."""
    check_tables(name, torch.float32)


@pytest.mark.parametrize("name", [n for n in TABLED if INVENTORY.definitions[n].inputs["cos"].dtype == "float32"])
def test_narrow_tables_where_float32_ones_are_declared(name):
    check_tables(name, torch.bfloat16)


def check_tables(name, dtype):
    inputs = case(name, torch.bfloat16, "ordinary", {"D": 64, "R": 32})
    inputs |= {key: torch.randn(inputs[key].shape).to(dtype) for key in ("cos", "sin")}
    got, expected = INVENTORY.entry_point(name)(**inputs), INVENTORY.reference(name)(**inputs)
    for value, exact in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
        assert value.dtype == exact.dtype
        torch.testing.assert_close(value, exact, rtol=1.6e-2 if "norm" in name else 1e-6, atol=1e-6)


def test_conjugated_phases_turn_the_other_way():
    inputs = case("rotary_embedding_complex", torch.float32, "ordinary", {"D": 64})
    inputs["phases"] = inputs["phases"].conj()
    got = INVENTORY.entry_point("rotary_embedding_complex")(**inputs)
    for value, right in zip(got, INVENTORY.reference("rotary_embedding_complex")(**inputs), strict=True):
        torch.testing.assert_close(value, right)


@pytest.mark.parametrize("name", NAMES)
def test_angles_of_one_sequence_serve_the_whole_batch(name):
    inputs = case(name, torch.float32, "ordinary", {"D": 64, "R": 32})
    tables = {k: v[:1] for k, v in inputs.items() if k in ("cos", "sin", "phases")}
    narrow = {**inputs, **tables}
    wide = {**inputs, **{k: v.repeat(2, *[1] * (v.dim() - 1)) for k, v in tables.items()}}
    got, expected = INVENTORY.entry_point(name)(**narrow), INVENTORY.entry_point(name)(**wide)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    assert all(torch.equal(value, right) for value, right in pairs)


@pytest.mark.parametrize("name", PARTIAL)
def test_columns_that_pass_through_keep_every_bit(name):
    inputs = case(name, torch.bfloat16, "ordinary", {"D": 64})
    inputs["q"][..., -1] = torch.inf
    q, _ = INVENTORY.entry_point(name)(**inputs)
    rotated = inputs["cos"].shape[-1]
    assert torch.equal(q[..., rotated:], inputs["q"][..., rotated:])
    assert q[..., :rotated].isfinite().all()


def test_no_positions_launch_nothing():
    with recorded() as launches:
        for name in NAMES:
            INVENTORY.entry_point(name)(**case(name, torch.float32, "ordinary", {"S": 0, "D": 64, "R": 32}))
    assert launches == []


def test_a_decode_step_takes_one_position(kernels):
    for heads in (1, 8, 71):
        for width in (64, 80, 96, 128, 256):
            per_heads, positions, columns = kernels.pick_tiles(heads, 1, width)
            assert positions == 1
            assert width <= columns < 2 * width
            assert kernels.pick_tiles(heads, 2048, width)[1] * per_heads * columns == kernels.BLOCK


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    for index, name in enumerate(NAMES[place % 2 :: 2]):
        dtype = DTYPES[(index + place) % 3]
        inputs = case(name, dtype, "ordinary", {"D": (128, 80)[index % 2], "R": (64, 40)[index % 2]})
        with recorded() as launches:
            INVENTORY.entry_point(name)(**inputs)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
