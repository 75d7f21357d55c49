"""The kernels of two arrays side by side and of a sigmoid gate, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 5, 7, 128, 64), (1, 3, 1, 128, 64), (2, 2, 33, 40, 9), (1, 1, 2, 600, 3)], ids=str
)
def test_two_arrays_with_strides_stand_side_by_side(sizes, dtype, device):
    batch, heads, positions, left, right = sizes
    packed = torch.randn(batch, positions, heads, left + 11, device=device).to(dtype).transpose(1, 2)
    a, b = packed[..., 11:], torch.randn(batch, heads, positions, right, device=device).to(dtype)
    assert torch.equal(INVENTORY.entry_point("concat_last")(a, b), torch.cat((a, b), -1))
    one = b[:, :1]
    got = INVENTORY.entry_point("concat_last_shared")(a, one)
    assert torch.equal(got, torch.cat((a, one.expand(-1, heads, -1, -1)), -1))
    assert got.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_gate_agrees_with_float64(dtype, device):
    def run(hidden_states, gate):
        return INVENTORY.entry_point("sigmoid_mul")(hidden_states.to(device), gate.to(device)).cpu()

    for sizes in ({"N": 2, "H": 3072}, {"N": 5, "H": 517}, {"N": 2, "H": 3}):
        for rows in ROWS:
            inputs = make_inputs("sigmoid_mul", dtype, rows, "as trained", sizes)
            assert worst(run, "sigmoid_mul", inputs, dtype) <= 1
            assert worst(run, "sigmoid_mul", {**inputs, "gate": inputs["gate"][:, :1]}, dtype) <= 1


def test_sigmoid_gate_saturates_and_takes_halves_of_a_projection_without_a_copy():
    x = torch.ones(2, 3, 4)
    gate = torch.tensor([-1e4, 1e4, 0.0, math.inf])
    got = INVENTORY.entry_point("sigmoid_mul")(x, gate.expand(2, 3, 4))
    assert got[0, 0].tolist() == [0.0, 1.0, 0.5, 1.0]
    packed = torch.randn(3, 10, 64)
    got = INVENTORY.entry_point("sigmoid_mul")(packed[..., :32], packed[..., 32:])
    assert torch.allclose(got, packed[..., :32] * packed[..., 32:].sigmoid())
    with recorded() as launches:
        INVENTORY.entry_point("sigmoid_mul")(packed[..., :32], packed[..., 32:])
    assert launches[0].args[0].data_ptr() == packed.data_ptr()


def test_nothing_launches_nothing():
    with recorded() as launches:
        assert INVENTORY.entry_point("sigmoid_mul")(torch.ones(0, 4), torch.ones(0, 4)).shape == (0, 4)
        assert INVENTORY.entry_point("concat_last")(torch.ones(1, 0, 2, 4), torch.ones(1, 0, 2, 3)).shape == (
            1,
            0,
            2,
            7,
        )
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    x = torch.empty(1, 16, 64, 128, dtype=dtype, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point("concat_last_shared")(x, x[:, :1, :, :64])
        INVENTORY.entry_point("sigmoid_mul")(x[..., :64], x[..., 64:])
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
