"""Norm and rotary embedding of the heads in one launch, against float64 and the reference's roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("rms_norm_rotary_embedding", "rms_norm_plus_one_rotary_embedding")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SIZES = (
    {"D": 64, "Hq": 9, "Hk": 3}, {"D": 80, "Hq": 4, "Hk": 4, "S": 5}, {"D": 128, "Hq": 8, "Hk": 2, "S": 1},
    {"D": 256, "Hq": 16, "Hk": 8, "S": 3}, {"D": 6, "Hq": 71, "Hk": 1},
)  # fmt: skip


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> tuple[torch.Tensor, ...]:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return tuple(r.cpu() for r in INVENTORY.entry_point(name)(**moved))

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_kind_of_head(name: str, dtype: torch.dtype, device: str) -> None:
    for sizes in SIZES:
        for rows in ROWS if sizes["D"] == 64 else ("ordinary",):
            inputs = make_inputs(name, dtype, rows, "as trained", sizes)
            assert worst(on(device, name), name, inputs, dtype) <= 1, (sizes, rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_is_where_the_reference_has_it(name: str) -> None:
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"D": 128, "S": 16})
    for value, right in zip(on("cpu", name)(**inputs), INVENTORY.reference(name)(**inputs), strict=True):
        differs = (value != right).float().mean()
        assert differs < 1e-3  # sums in another order move a norm across a rounding now and then


def test_views_of_a_packed_projection_are_read_in_place() -> None:
    qkv = torch.randn(2, 7, 12 * 32)
    q, k, _ = qkv.split((8 * 32, 2 * 32, 2 * 32), dim=-1)
    q, k, weight = q.view(2, 7, 8, 32), k.view(2, 7, 2, 32), torch.randn(32)
    angles = torch.randn(1, 7, 32)
    arguments = weight, weight, 1e-6, angles.cos(), angles.sin()
    function = INVENTORY.entry_point(NAMES[0])
    with recorded() as launches:
        function(q, k, *arguments)
    assert [a.data_ptr() for a in launches[0].args[:2]] == [q.data_ptr(), k.data_ptr()]
    for got, expected in zip(
        function(q, k, *arguments), function(q.clone(), k.clone(), *arguments), strict=True
    ):  # fmt: skip
        assert got.is_contiguous()
        assert torch.equal(got, expected)


def test_no_positions_launch_nothing() -> None:
    inputs = make_inputs(NAMES[0], torch.float32, "ordinary", "as trained", {"S": 0, "D": 64})
    with recorded() as launches:
        q, _ = INVENTORY.entry_point(NAMES[0])(**inputs)
    assert q.shape == (2, 6, 0, 64)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch: str) -> None:
    for index, name in enumerate(NAMES):
        turn = index + ARCHITECTURES.index(arch)
        dtype, dim = DTYPES[turn % 3], (128, 80)[turn % 2]
        make = {"dtype": dtype, "device": "meta"}
        q, k = (torch.empty(1, 64, heads, dim, **make) for heads in (32, 8))
        weight, angles = torch.empty(dim, **make), torch.empty(1, 64, dim, **make)
        with recorded() as launches:
            INVENTORY.entry_point(name)(q, k, weight, weight, 1e-6, angles, angles)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
