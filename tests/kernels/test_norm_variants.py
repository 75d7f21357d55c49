"""Norms without weight or bias and with a gate, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("rms_norm_unweighted", "rms_norm_gated", "layer_norm_no_bias", "l2_norm", "l2_clip")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One block a row, several rows a block, ragged chunks, and rows that are read again.
SIZES = ({"N": 3, "H": 2880}, {"N": 600, "H": 24}, {"N": 5, "H": 576}, {"N": 2, "H": 17000})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, device):
    def run(**inputs):
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(name)(**given).cpu()

    for sizes in SIZES:
        for rows in ROWS if sizes["N"] < 100 else ("ordinary",):
            assert worst(run, name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


def test_strided_rows_need_no_copy():
    packed = torch.randn(4, 6, 96)
    with recorded() as launches:
        INVENTORY.entry_point("rms_norm_unweighted")(packed[..., 32:64], 1e-6)
    assert launches[0].args[0].data_ptr() == packed[..., 32:].data_ptr()


def test_a_large_mean_does_not_swallow_the_spread():
    x = 1000.0 + torch.randn(4, 200)
    got = INVENTORY.entry_point("layer_norm_no_bias")(x, torch.ones(200), 1e-6)
    torch.testing.assert_close(got, torch.nn.functional.layer_norm(x, (200,), eps=1e-6), rtol=1e-3, atol=1e-3)


def test_rows_no_longer_than_the_threshold_keep_every_bit():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]).bfloat16()
    got = INVENTORY.entry_point("l2_clip")(x, 2.5, 1e-6)
    assert torch.equal(got[1:], x[1:])
    assert torch.equal(got[0], x[0] / 2)


def test_no_rows_launch_nothing():
    with recorded() as launches:
        assert INVENTORY.entry_point("rms_norm_unweighted")(torch.ones(0, 8), 1e-6).shape == (0, 8)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    x, weight = torch.empty(64, 2880, dtype=dtype, device="meta"), torch.empty(2880, dtype=dtype, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point("rms_norm_unweighted")(x, 1e-6)
        INVENTORY.entry_point("rms_norm_gated")(x, x, weight, 1e-6)
        INVENTORY.entry_point("layer_norm_no_bias")(x, weight, 1e-6)
        INVENTORY.entry_point("l2_norm")(x, 1e-6)
        INVENTORY.entry_point("l2_clip")(x, 5.0, 1e-6)
    for made in launches[ARCHITECTURES.index(arch) :: 4]:
        assert compile_kernel(made.kernel, made.args, arch)
