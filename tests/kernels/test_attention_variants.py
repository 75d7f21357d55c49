"""Attention with sinks, capped scores or values of their own width against float64, interpreted and on a
GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

MASKED = ("sink_attention_masked", "softcap_attention_masked")
WIDE = ("mla_attention", "mla_attention_causal", "mla_attention_masked")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Several tiles of queries and keys, every kind of head group, one and a few queries against a longer cache.
SIZES = (
    {"S": 70, "T": 70, "D": 64, "Hq": 4, "Hk": 2}, {"S": 9, "T": 150, "D": 80, "Hq": 3, "Hk": 3, "B": 1},
    {"S": 1, "T": 300, "D": 64, "Hq": 8, "Hk": 1}, {"S": 3, "T": 40, "D": 32, "Hq": 6, "Hk": 2},
)  # fmt: skip


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> torch.Tensor:
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return INVENTORY.entry_point(name)(**moved).cpu()

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_agrees_with_float64_at_every_length(name, dtype, device):
    for sizes in SIZES:
        for rows in ROWS if sizes["S"] == 1 else ("ordinary",):
            assert worst(on(device, name), name, make_inputs(name, dtype, rows, "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_step_with_sinks_agrees_with_float64(dtype, device):
    name = "sink_attention_step"
    for sizes in ({"T": 300, "D": 64, "Hq": 64, "Hk": 8}, {"T": 5, "D": 32, "Hq": 5, "Hk": 1}):
        assert worst(on(device, name), name, make_inputs(name, dtype, "ordinary", "as trained", sizes), dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WIDE)
def test_values_may_have_another_width_than_keys(name, device):
    for sizes in (
        {"S": 20, "T": 20, "D": 48, "V": 32},
        {"S": 1, "T": 90, "D": 24, "V": 64, "Hq": 4, "Hk": 4},
    ):
        inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", sizes)
        assert worst(on(device, name), name, inputs, torch.bfloat16) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKED)
def test_a_window_gives_what_all_keys_under_its_mask_give(name, device):
    """Tiles outside the window are skipped, at the mask's edges and where a row sees one key."""
    inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"S": 150, "T": 150, "D": 32, "B": 1})
    place = torch.arange(150)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < 20)
    inputs["mask"] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    assert worst(on(device, name), name, inputs, torch.float32) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_keys_gives_the_mean_of_values_or_with_a_sink_nothing(device):
    for name in MASKED:
        inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"S": 12, "T": 40})
        inputs["mask"][:, :, 5] = torch.finfo(torch.float32).min
        got = on(device, name)(**inputs)[:, 5]
        values = inputs["v"].mean(2).repeat_interleave(3, 1)
        expected = values if name.startswith("softcap") else torch.zeros_like(values)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MASKED)
def test_one_mask_serves_the_whole_batch(name):
    inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"B": 3})
    inputs["mask"] = inputs["mask"][:1]
    wide = {**inputs, "mask": inputs["mask"].repeat(3, 1, 1, 1)}
    assert torch.equal(INVENTORY.entry_point(name)(**inputs), INVENTORY.entry_point(name)(**wide))


def test_in_decode_the_heads_of_a_key_head_share_a_block_and_blocks_share_the_keys():
    q = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, 1, 4096, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        INVENTORY.entry_point("sink_attention_step")(q, k, k, mask, q[0, :, 0, 0].contiguous(), 0.125)
    _, attention, combine = launches
    assert attention.grid[:2] == (1, 8)
    assert attention.grid[2] > 8
    assert combine.grid == (8, 8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    for name, width, length in zip(MASKED, (64, 256), (256, 1)[:: 1 - 2 * (place % 2)], strict=True):
        dtype = DTYPES[place % 3]
        q = torch.empty(1, 16, length, width, dtype=dtype, device="meta")
        k, v = (torch.empty(1, 8, 512, width, dtype=dtype, device="meta") for _ in "kv")
        mask = torch.empty(1, 1, length, 512, dtype=dtype, device="meta")
        last = (torch.empty(16, dtype=dtype, device="meta"), 0.1) if "sink" in name else (0.1, 50.0)
        with recorded() as launches:
            INVENTORY.entry_point(name)(q, k, v, mask, *last)
        assert len(launches) == (2 if length > 1 else 3)
        for launch in launches:
            assert compile_kernel(launch.kernel, launch.args, arch)
