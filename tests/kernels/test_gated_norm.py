"""RMSNorm of gated values, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("gated_rms_norm", "gated_rms_norm_fp32")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SIZES = ({"B": 1, "L": 3, "H": 3 * 1024}, {"L": 20, "H": 27}, {"L": 1, "H": 3})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, device):
    def run(**inputs):
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(name)(**given).cpu()

    for sizes in SIZES:
        for rows in ROWS:
            assert worst(run, name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


def test_a_gate_that_is_part_of_a_wider_row_needs_no_copy():
    inputs = make_inputs("gated_rms_norm", torch.float32, "ordinary", "as trained", {"B": 1, "L": 4, "H": 12})
    wide = torch.cat([torch.ones(1, 4, 8), inputs["gate"]], -1)
    with recorded() as launches:
        INVENTORY.entry_point("gated_rms_norm")(**{**inputs, "gate": wide[..., 8:]})
    assert launches[0].args[1].data_ptr() == wide[..., 8:].data_ptr()


def test_no_rows_launch_nothing():
    inputs = make_inputs("gated_rms_norm", torch.float32, "ordinary", "as trained", {"L": 0, "H": 12})
    with recorded() as launches:
        assert INVENTORY.entry_point("gated_rms_norm")(**inputs).shape == (2, 0, 12)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    for name in NAMES:
        with recorded() as launches:
            INVENTORY.entry_point(name)(**make_inputs(name, dtype, "ordinary", "as trained", {"L": 2, "H": 3 * 1024}))
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
