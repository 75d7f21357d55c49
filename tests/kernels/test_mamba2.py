"""Mamba2's states over a prompt and over one position, interpreted and, marked gpu, on a GPU."""

from __future__ import annotations

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("mamba2_scan", "mamba2_step", "mamba2_readout")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Several tiles of positions and a ragged one, of columns, one state, and as many heads as groups.
SIZES = (
    {"B": 1, "L": 75, "Hs": 2, "Gs": 1, "Ps": 40, "Ns": 128},
    {"L": 64, "Hs": 3, "Gs": 3, "Ps": 3, "Ns": 1},
    {"L": 1},
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


def test_the_authors_chunks_change_nothing():
    inputs = make_inputs("mamba2_scan", torch.float32, "ordinary", "as trained", {"L": 40})
    got = [INVENTORY.reference("mamba2_scan")(**{**inputs, "chunk_size": size}) for size in (5, 40, 64)]
    for parts in zip(*got, strict=True):
        torch.testing.assert_close(parts[1], parts[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts[2], parts[0], rtol=1e-4, atol=1e-5)


def test_a_step_continues_a_prompt():
    inputs = make_inputs("mamba2_scan", torch.float32, "ordinary", "as trained", {"L": 33})
    inputs |= {"least": 0.0, "most": float("inf")}
    cut = {k: v[:, :-1] if k in ("x", "dt", "B", "C") else v for k, v in inputs.items()}
    output, state = INVENTORY.entry_point("mamba2_scan")(**inputs)
    _, before = INVENTORY.entry_point("mamba2_scan")(**cut)
    last = {k: inputs[k][:, -1:] for k in ("x", "dt", "B", "C")}
    after = INVENTORY.entry_point("mamba2_step")(
        before, last["x"], last["dt"], inputs["A_log"], last["B"], inputs["dt_bias"]
    )
    torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-5)
    read = INVENTORY.entry_point("mamba2_readout")(after, last["x"], last["C"], inputs["D"])
    torch.testing.assert_close(read, output[:, -1], rtol=1e-4, atol=1e-5)


def test_a_prompt_that_lies_channel_by_channel_needs_no_copy():
    """The convolution before it leaves x, B and C with the positions side by side."""
    inputs = make_inputs("mamba2_scan", torch.float32, "ordinary", "as trained", {"L": 40})
    turned = {k: inputs[k].movedim(1, -1).contiguous().movedim(-1, 1) for k in ("x", "B", "C")}
    with recorded() as launches:
        INVENTORY.entry_point("mamba2_scan")(**{**inputs, **turned})
    assert launches[0].args[0].data_ptr() == turned["x"].data_ptr()
    got, want = (INVENTORY.entry_point("mamba2_scan")(**given) for given in ({**inputs, **turned}, inputs))
    assert all(map(torch.equal, got, want))


def test_nothing_launches_nothing():
    empty = make_inputs("mamba2_scan", torch.float32, "ordinary", "as trained", {"B": 0})
    with recorded() as launches:
        output, state = INVENTORY.entry_point("mamba2_scan")(**empty)
    assert (launches, output.shape[0], state.shape[0]) == ([], 0, 0)


def compiles(name, dtype, arch, sizes):
    with recorded() as launches:
        INVENTORY.entry_point(name)(**make_inputs(name, dtype, "ordinary", "as trained", sizes))
    return all(compile_kernel(made.kernel, made.args, arch) for made in launches)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    for name in NAMES:
        assert compiles(name, dtype, arch, {"Hs": 4, "Gs": 2, "Ps": 16, "Ns": 16})


def test_compiles_at_the_sizes_of_a_model():
    assert compiles("mamba2_scan", torch.bfloat16, "sm_90", {"L": 2, "Hs": 8, "Gs": 8, "Ps": 64, "Ns": 128})
