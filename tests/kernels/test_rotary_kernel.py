"""The rotary kernel against float64, through the interpreter and, marked gpu, on a GPU."""

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

NAMES = ("rotary_embedding", "rotary_embedding_fp32")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Head sizes that fill a tile and others, head counts that fill a group and others, and a single position.
SIZES = (
    {"D": 64, "Hq": 9, "Hk": 3}, {"D": 80, "Hq": 4, "Hk": 4, "S": 5}, {"D": 96, "Hq": 3, "Hk": 1, "S": 1},
    {"D": 128, "Hq": 8, "Hk": 2, "S": 12}, {"D": 256, "Hq": 16, "Hk": 8, "S": 3}, {"D": 6, "Hq": 71, "Hk": 1},
)  # fmt: skip

Heads = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point("rotary_embedding").__module__]


def on(device: str, name: str) -> Any:
    def run(**inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()})
        return tuple(r.cpu() for r in result)

    return run


def projected(device: str, dtype: torch.dtype = torch.bfloat16) -> Heads:
    """Queries and keys as a model has them: transposed views of one packed projection."""
    qkv = torch.randn(2, 7, (8 + 2 * 2) * 32, dtype=dtype, device=device)
    q, k, _ = qkv.split((8 * 32, 2 * 32, 2 * 32), dim=-1)
    angles = torch.randn(1, 7, 32, device=device)
    heads = (x.view(2, 7, -1, 32).transpose(1, 2) for x in (q, k))
    return dict(zip(("q", "k", "cos", "sin"), (*heads, angles.cos().to(dtype), angles.sin().to(dtype)), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_kind_of_head(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS if sizes["D"] == 64 else ("ordinary",):
            assert worst(on(device, name), name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_is_where_the_reference_has_it(name, dtype, device):
    inputs = make_inputs(name, dtype, "ordinary", "as trained", {"D": 128, "S": 16})
    expected = INVENTORY.reference(name)(**inputs)
    for value, right in zip(on(device, name)(**inputs), expected, strict=True):
        assert torch.equal(value, right) or (dtype == torch.float32 and torch.allclose(value, right, 1e-6, 1e-6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_halves_of_cos_and_sin_may_differ(name, device):
    inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"D": 64})
    inputs["cos"], inputs["sin"] = torch.randn_like(inputs["cos"]), torch.randn_like(inputs["sin"])
    assert worst(on(device, name), name, inputs, torch.float32) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_views_of_a_packed_projection_give_what_copies_give(name, device):
    views = projected(device)
    copies = {key: value.contiguous() for key, value in views.items()}
    function = INVENTORY.entry_point(name)
    for got, expected in zip(function(**views), function(**copies), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, expected)


def test_views_are_not_copied():
    views = projected("cpu")
    with recorded() as launches:
        INVENTORY.entry_point("rotary_embedding")(**views)
    (launch,) = launches
    assert [a.data_ptr() for a in launch.args[:4]] == [v.data_ptr() for v in views.values()]


@pytest.mark.parametrize("device", DEVICES)
def test_angles_of_one_sequence_serve_the_whole_batch(device):
    views = projected(device, torch.float32)
    wide = {**views, "cos": views["cos"].repeat(2, 1, 1), "sin": views["sin"].repeat(2, 1, 1)}
    function = INVENTORY.entry_point("rotary_embedding")
    assert all(map(torch.equal, function(**views), function(**wide)))


@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_are_promoted_like_the_references(name):
    for dtype, angle_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        views = projected("cpu", dtype)
        views.update(cos=views["cos"].to(angle_dtype), sin=views["sin"].to(angle_dtype))
        expected = INVENTORY.reference(name)(**views)
        for got, right in zip(INVENTORY.entry_point(name)(**views), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_between_the_halves_and_beyond_a_head_is_never_read(device):
    memory = torch.full((1, 3, 2, 128), math.nan, device=device)
    memory[..., :80] = 1
    x, one = memory[..., :80].transpose(1, 2), torch.ones(1, 3, 80, device=device)
    for out in INVENTORY.entry_point("rotary_embedding")(x, x, one, one):
        assert torch.equal(out, torch.cat((torch.zeros(40), 2 * torch.ones(40))).expand(1, 2, 3, 80).to(device))


def test_no_positions_launch_nothing():
    inputs = make_inputs("rotary_embedding", torch.float32, "ordinary", "as trained", {"S": 0, "D": 64})
    with recorded() as launches:
        q, _ = INVENTORY.entry_point("rotary_embedding")(**inputs)
    assert q.shape == inputs["q"].shape
    assert launches == []


def test_tiles_cover_half_a_head_and_a_decode_step_takes_one_position(kernels):
    for heads in (1, 8, 9, 32, 71):
        for dim in (64, 80, 96, 128, 256):
            per_heads, positions, half = kernels.pick_tiles(heads, 1, dim // 2)
            assert positions == 1
            assert dim // 2 <= half < dim
            assert per_heads <= kernels.MAX_HEADS
            assert kernels.pick_tiles(heads, 2048, dim // 2)[1] * per_heads * half >= 2048


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    for index, name in enumerate(NAMES):
        dtype, dim = (
            DTYPES[(index + ARCHITECTURES.index(arch)) % 3],
            (128, 80)[(index + ARCHITECTURES.index(arch)) % 2],
        )
        q, k = (torch.empty(1, 64, heads, dim, dtype=dtype, device="meta").transpose(1, 2) for heads in (32, 8))
        angles = torch.empty(1, 64, dim, dtype=torch.float32 if index else dtype, device="meta")
        with recorded() as launches:
            INVENTORY.entry_point(name)(q, k, angles, angles)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
