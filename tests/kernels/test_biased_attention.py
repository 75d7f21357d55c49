"""Attention with a bias or with a fill against float64, interpreted and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

BIASED, FILLED = "biased_attention_masked", "biased_attention_filled"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Several tiles of queries and keys, one and a few queries against a longer cache, odd widths and heads.
SIZES = (
    {"S": 70, "T": 70, "D": 64, "Hq": 2, "B": 1}, {"S": 3, "T": 40, "D": 32, "Hq": 6},
    {"S": 1, "T": 300, "D": 64, "Hq": 3}, {"S": 9, "T": 150, "D": 80, "Hq": 2, "B": 1},
)  # fmt: skip


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> torch.Tensor:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(name)(**moved).cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_agrees_with_float64_at_every_length(dtype, device):
    for place, sizes in enumerate(SIZES):
        for is_float in (True, False) if place in (1, 2) else (place == 0,):
            inputs = make_inputs(BIASED, dtype, "ordinary", "as trained", sizes, is_float)
            assert worst(on(device, BIASED), BIASED, inputs, dtype) <= 1, (sizes, is_float)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fill_agrees_with_float64_at_every_length(dtype, device):
    for place, sizes in enumerate(SIZES):
        inputs = make_inputs(FILLED, dtype, "ordinary", "as trained", sizes)
        inputs["fill"] = (-torch.inf, -3e4, torch.finfo(dtype).min)[place % 3]
        inputs["bias"] = inputs["bias"][(slice(None), slice(0, 1))[place % 2]][:, :: (1, 8)[place % 2]]
        inputs["hides"] = int(place == 2)
        if place == 1:
            inputs["mask"] = inputs["mask"].to(dtype)
        assert worst(on(device, FILLED), FILLED, inputs, dtype) <= 1, sizes


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_bias_takes_away_comes_before_what_is_filled(device):
    """As in eager code, whose least numbers differ: a query weighs the keys that it would see but for the padding."""
    inputs = make_inputs(FILLED, torch.float32, "ordinary", "as trained", {"S": 6, "T": 20, "B": 1})
    inputs["mask"][..., :4], inputs["mask"][..., 4:] = True, False
    inputs["bias"][:] = 0.0
    inputs["bias"][..., :8] = torch.finfo(torch.bfloat16).min
    inputs["fill"], values = torch.finfo(torch.float32).min, inputs["v"]
    expected = values[:, :, :4].mean(2)[:, None].expand(-1, 6, -1, -1)
    torch.testing.assert_close(on(device, FILLED)(**inputs), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(INVENTORY.reference(FILLED)(**inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", ["reference", "kernel"])
def test_a_fill_may_be_a_number_that_only_float32_has(run):
    inputs = make_inputs(FILLED, torch.bfloat16, "ordinary", "as trained", {"S": 5, "T": 12})
    inputs["fill"] = torch.finfo(torch.float32).min
    function = INVENTORY.reference(FILLED) if run == "reference" else on("cpu", FILLED)
    assert worst(function, FILLED, inputs, torch.bfloat16) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fill", "share"), [(-torch.inf, 0.0), (-1e4, 1.0)])
def test_a_row_that_is_all_filled(fill, share, device):
    inputs = make_inputs(FILLED, torch.float32, "ordinary", "as trained", {"S": 12, "T": 40})
    inputs["mask"][:, :, 5], inputs["fill"], inputs["bias"] = False, fill, torch.zeros(1, 1, 1, 40)
    got = on(device, FILLED)(**inputs)[:, 5]
    torch.testing.assert_close(got, share * inputs["v"].mean(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(INVENTORY.reference(FILLED)(**inputs)[:, 5], got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_may_share_the_bias_and_it_may_be_float32(device):
    inputs = make_inputs(BIASED, torch.bfloat16, "ordinary", "as trained", {"S": 5, "T": 40})
    inputs["bias"] = inputs["bias"][: inputs["q"].shape[1]]
    repeated = {**inputs, "bias": inputs["bias"].repeat(2, 1, 1).float()}
    assert torch.equal(on(device, BIASED)(**inputs), on(device, BIASED)(**repeated))
    assert worst(on(device, BIASED), BIASED, inputs, torch.bfloat16) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_float", [True, False])
def test_a_row_without_keys_gives_the_mean_of_values(is_float, device):
    inputs = make_inputs(BIASED, torch.float32, "ordinary", "as trained", {"S": 12, "T": 40}, is_float)
    inputs["mask"][:, :, 5] = torch.finfo(torch.float32).min if is_float else True
    got = on(device, BIASED)(**inputs)[:, 5]
    torch.testing.assert_close(got, inputs["v"].mean(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_that_a_mask_takes_from_all_queries_of_a_block_are_not_read(device):
    """A value that is not finite would show."""
    inputs = make_inputs(BIASED, torch.float32, "ordinary", "as trained", {"S": 40, "T": 200, "B": 1})
    inputs["mask"] = torch.ones(1, 1, 40, 200, dtype=torch.bool)
    inputs["mask"][..., 64:96] = False
    inputs["v"][:, :, 130:] = torch.inf
    assert on(device, BIASED)(**inputs).isfinite().all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    dtype, length = DTYPES[place % 3], (256, 1)[place % 2]
    q, k, v = (torch.empty(1, 8, rows, 64, dtype=dtype, device="meta") for rows in (length, 512, 512))
    bias = torch.empty(8, 1, 512, dtype=torch.float32, device="meta")
    mask = torch.empty(1, 1, length, 512, dtype=(torch.bool, dtype)[place // 2], device="meta")
    with recorded() as launches:
        if place % 2:
            INVENTORY.entry_point(BIASED)(q, k, v, bias, mask, 0.1)
        else:
            INVENTORY.entry_point(FILLED)(q, k, v, bias[None], mask.bool(), 8.0, -torch.inf, 1)
    assert len(launches) == (2 if length > 1 else 3)
    for launch in launches:
        assert compile_kernel(launch.kernel, launch.args, arch)
