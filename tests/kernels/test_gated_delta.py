"""The gated delta rule at one position, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("gated_delta_step", "delta_decay")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Several tiles of values and a ragged one, keys that no tile fits, one head, and many rows.
SIZES = (
    {"B": 1, "Hk": 1, "Hv": 2, "D": 128, "Dv": 72},
    {"D": 24, "Dv": 3, "N": 1, "H": 1},
    {"Hk": 6, "N": 700, "H": 30},
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, device):
    def run(**inputs):
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        made = INVENTORY.entry_point(name)(**given)
        return tuple(part.cpu() for part in made) if isinstance(made, tuple) else made.cpu()

    for sizes in SIZES:
        for rows in ROWS:
            assert worst(run, name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


def test_the_states_then_hold_the_value_of_their_key():
    """With beta 1, nothing faded and a key for a query: what is read is the value."""
    inputs = make_inputs("gated_delta_step", torch.float32, "ordinary", "as trained", {"Hk": 6})
    inputs |= {"beta": torch.ones(2, 1, 6), "decay": torch.zeros(2, 1, 6), "q": inputs["k"], "eps": 0.0}
    output, _ = INVENTORY.entry_point("gated_delta_step")(**inputs)
    torch.testing.assert_close(output * 4, inputs["v"][:, 0], rtol=1e-4, atol=1e-4)


def test_nothing_launches_nothing():
    empty = make_inputs("gated_delta_step", torch.float32, "ordinary", "as trained", {"B": 0})
    with recorded() as launches:
        output, state = INVENTORY.entry_point("gated_delta_step")(**empty)
    assert (launches, output.shape[0], state.shape[0]) == ([], 0, 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    for name in NAMES:
        sizes = {"Hk": 2, "Hv": 4, "D": 128, "Dv": 128, "N": 64, "H": 32}
        with recorded() as launches:
            INVENTORY.entry_point(name)(**make_inputs(name, dtype, "ordinary", "as trained", sizes))
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
