"""Causal convolutions of a prompt and of one token, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

PROMPTS = ("causal_conv1d", "causal_conv1d_silu", "causal_conv1d_bias_silu")
STEPS = ("causal_conv1d_step", "causal_conv1d_step_silu", "causal_conv1d_step_bias_silu")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Fewer positions than taps, ragged tiles along both axes, and a convolution that is a product alone.
SIZES = ({"C": 3, "L": 2}, {"C": 37, "L": 150}, {"C": 130, "L": 9, "J": 1, "W": 2}, {"C": 600, "L": 5, "J": 7, "W": 8})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROMPTS + STEPS)
def test_agrees_with_float64(name, dtype, device):
    def run(**inputs):
        return INVENTORY.entry_point(name)(**{k: v.to(device) for k, v in inputs.items()}).cpu()

    for sizes in SIZES:
        for rows in ROWS:
            assert worst(run, name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_side_by_side_or_channels_side_by_side(name):
    """A prompt comes transposed out of a linear layer: no copy is made, and the values are the same."""
    inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"C": 40, "L": 70})
    turned = inputs["x"].transpose(1, 2).contiguous().transpose(1, 2)
    with recorded() as launches:
        INVENTORY.entry_point(name)(**{**inputs, "x": turned})
    assert launches[0].args[0].data_ptr() == turned.data_ptr()
    got, want = (INVENTORY.entry_point(name)(**{**inputs, "x": x}) for x in (turned, inputs["x"]))
    assert got.is_contiguous()
    assert torch.equal(got, want)


def test_a_step_continues_a_prompt():
    inputs = make_inputs("causal_conv1d_bias_silu", torch.float32, "ordinary", "as trained", {"L": 11})
    whole = INVENTORY.entry_point("causal_conv1d_bias_silu")(**inputs)
    window = inputs["x"][..., -5:]
    step = INVENTORY.entry_point("causal_conv1d_step_bias_silu")(window, inputs["weight"], inputs["bias"])
    assert torch.equal(step, whole[..., -1:])


def test_nothing_launches_nothing():
    with recorded() as launches:
        assert INVENTORY.entry_point("causal_conv1d")(torch.ones(0, 8, 4), torch.ones(8, 1, 4)).shape == (0, 8, 4)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    x = torch.empty(1, 2048, 10240, dtype=dtype, device="meta").transpose(1, 2)
    weight, bias = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((10240, 1, 4), (10240,)))
    with recorded() as launches:
        INVENTORY.entry_point("causal_conv1d_bias_silu")(x, weight, bias)
        INVENTORY.entry_point("causal_conv1d_step_silu")(x.contiguous()[..., :5], weight)
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
