"""experts_rows and experts_combine against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("experts_rows", "experts_combine")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: One token, a number of experts of a token that is no power of two, more columns than a block has.
SIZES = ({"N": 1, "K": 4, "H": 40}, {"N": 37, "K": 3, "H": 136}, {"N": 9, "K": 1, "H": 1500})


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> Any:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        made = INVENTORY.entry_point(name)(**moved)
        return tuple(value.cpu() for value in made) if isinstance(made, tuple) else made.cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, device):
    for sizes in SIZES:
        assert worst(on(device, name), name, make_inputs(name, dtype, "ordinary", "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_taken_apart_comes_together_again(device):
    x, weights = torch.randn(21, 48), torch.rand(21, 2)
    index = torch.randint(0, 6, (21, 2), generator=torch.Generator().manual_seed(0))
    rows, order, ends = on(device, "experts_rows")(hidden_states=x, top_k_index=index, count=9)
    assert ends.tolist() == torch.bincount(index.reshape(-1), minlength=9).cumsum(0).tolist()
    got = on(device, "experts_combine")(rows=rows, top_k_weights=weights, order=order)
    torch.testing.assert_close(got, x * weights.sum(1, keepdim=True))


def test_no_tokens_launch_nothing():
    with recorded() as launches:
        index = torch.zeros(0, 2, dtype=torch.long)
        rows, order, ends = INVENTORY.entry_point("experts_rows")(torch.ones(0, 8), index, 3)
        out = INVENTORY.entry_point("experts_combine")(rows, torch.ones(0, 2), order)
    assert (rows.shape, order.shape, ends.tolist(), out.shape) == ((0, 8), (0,), [0, 0, 0], (0, 8))
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    dtype = DTYPES[ARCHITECTURES.index(arch) % 3]
    x, index = torch.empty(64, 2048, dtype=dtype, device="meta"), torch.empty(64, 6, dtype=torch.long, device="meta")
    with recorded() as launches:
        rows, order, _ = INVENTORY.entry_point("experts_rows")(x, index, 128)
        INVENTORY.entry_point("experts_combine")(rows, torch.empty(64, 6, device="meta"), order)
    assert len(launches) == 4
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
