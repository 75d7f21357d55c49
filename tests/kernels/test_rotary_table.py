"""The kernel for tables of cosines and sines, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import INVENTORY, OUTPUT_DTYPES, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = tuple(name for name in OUTPUT_DTYPES if name.startswith("rotary_table"))
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SIZES = ({"S": 9, "R": 32}, {"S": 70, "R": 40, "B": 1}, {"S": 1, "R": 64, "B": 3}, {"S": 5, "R": 3})


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> tuple[torch.Tensor, ...]:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return tuple(r.cpu() for r in INVENTORY.entry_point(name)(**moved))

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_at_every_width(name, device):
    for sizes in SIZES:
        inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", sizes)
        assert worst(on(device, name), name, inputs, torch.bfloat16) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_angles_of_a_million_radians_keep_their_digits(device):
    inputs = {"positions": torch.tensor([[[1_048_573], [999_999], [131_071]]]), "frequencies": torch.ones(8)}
    assert worst(on(device, "rotary_table_fp32"), "rotary_table_fp32", inputs, torch.float32) <= 1


def test_positions_may_lie_apart_in_memory():
    inputs = make_inputs("rotary_table", torch.bfloat16, "ordinary", "as trained", {})
    apart = {**inputs, "positions": inputs["positions"].repeat(1, 1, 2)[..., :1]}
    for got, expected in zip(on("cpu", "rotary_table")(**apart), on("cpu", "rotary_table")(**inputs), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    name = NAMES[ARCHITECTURES.index(arch) % len(NAMES)]
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"S": 64, "R": 64})
    with recorded() as launches:
        INVENTORY.entry_point(name)(**inputs)
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
