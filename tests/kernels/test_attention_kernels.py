"""The three attentions against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from attentions import BRAIN, DEVICES, DTYPES, FULL, HALF, check, launches_of, masks, operands

from tilegym_fx import inventory
from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

#: B, Hq, Hk, S, T, D: many queries and few, widths with and without padding, groups that are no power of two.
SHAPES = (
    (2, 4, 2, 70, 70, 64), (1, 4, 1, 40, 200, 80), (1, 3, 3, 100, 40, 96), (1, 2, 1, 20, 150, 256),
    (2, 6, 2, 1, 150, 64), (1, 7, 1, 3, 300, 128), (2, 2, 2, 1, 40, 80), (1, 71, 1, 1, 90, 64),
    (1, 2, 1, 1, 1, 64),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[inventory.load().entry_point("gqa_attention").__module__]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gqa_attention", "gqa_attention_causal"])
def test_equals_the_definition_at_every_kind_of_shape(kernels, name, dtype, device):
    for shape in SHAPES:
        q, k, v = operands(*shape, dtype)
        check(kernels, name, q, k, v, 0.7 * shape[-1] ** -0.5, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 4, 2, 70, 90, 64),
        (2, 6, 2, 1, 600, 80),
        (2, 4, 2, 3, 700, 64),
        (2, 8, 2, 1, 13, 128),
        (2, 8, 2, 12, 12, 128),
    ],
)
def test_masks_boolean_and_added_mean_the_same(kernels, shape, dtype, device):
    batch, heads, _, length, keys, width = shape
    q, k, v = operands(*shape, dtype)
    for mask in masks(batch, heads, length, keys).values():
        scale = width**-0.5
        check(kernels, "gqa_attention_masked", q, k, v, mask, scale, device=device)
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        check(kernels, "gqa_attention_masked", q, k, v, added, scale, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 40])
def test_the_least_number_of_a_dtype_masks_like_minus_infinity(kernels, length, dtype, device):
    q, k, v = operands(2, 4, 2, length, 1000, 64, dtype)
    seen = torch.zeros(2, 1, length, 1000, dtype=torch.bool)
    seen[..., 70:200] = True
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    got = check(kernels, "gqa_attention_masked", q, k, v, mask, 0.125, device=device)
    boolean = check(kernels, "gqa_attention_masked", q, k, v, seen, 0.125, device=device)
    torch.testing.assert_close(got, boolean, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 3, 40])
def test_a_query_with_the_least_number_everywhere_weighs_its_keys_alike(kernels, length, dtype, device):
    q, k, v = operands(2, 4, 2, length, 1000, 64, dtype)
    mask = torch.zeros(2, 1, length, 1000, dtype=dtype)
    mask[0, ..., 70:] = torch.finfo(dtype).min
    mask[1, :, 0] = torch.finfo(dtype).min
    out = check(kernels, "gqa_attention_masked", q, k, v, mask, 0.125, device=device)
    mean = v[1].mean(-2, dtype=torch.float64).repeat_interleave(2, 0)
    torch.testing.assert_close(out[1, 0].cpu().double(), mean, rtol=2**-7, atol=2**-9)


def test_a_bias_is_added_to_the_scaled_products(kernels):
    q, k, v = operands(2, 4, 2, 70, 90, 64, torch.float32)
    for mask in (torch.randn(2, 4, 70, 90), 5 * torch.randn(2, 1, 70, 90), torch.randn(1, 4, 1, 90)):
        check(kernels, "gqa_attention_masked", q, k, v, mask, 0.125)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 33])
def test_a_query_that_sees_nothing_gives_what_torch_gives(kernels, length, dtype):
    q, k, v = operands(1, 2, 2, length, 60, 64, dtype)
    mask = torch.ones(1, 1, length, 60, dtype=torch.bool)
    mask[:, :, -1] = False
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.125).transpose(1, 2)
    out = kernels.gqa_attention_masked(q, k, v, mask, 0.125)
    assert torch.equal(out[:, -1], expected[:, -1])
    assert (out[:, -1] == 0).all()


def test_values_may_be_of_another_width_than_keys(kernels):
    for length in (1, 30):
        q, k, _ = operands(1, 4, 4, length, 50, 192, torch.float32)
        v = torch.randn(1, 4, 50, 128)
        check(kernels, "gqa_attention", q, k, v, 0.07)
        check(kernels, "gqa_attention_causal", q, k, v, 0.07)


def test_keys_outside_the_span_of_a_mask_are_not_read(kernels):
    for length, start, stop in ((1, 512, 1024), (70, 128, 640)):  # whole steps
        q, k, v = (x.clone() for x in operands(1, 4, 2, length, 1536, 64, torch.bfloat16))
        mask = torch.zeros(1, 1, length, 1536, dtype=torch.bool)
        mask[..., start:stop] = True
        expected = kernels.gqa_attention_masked(q, k, v, mask, 0.125)
        for tensor in (k, v):
            tensor[:, :, :start] = math.nan
            tensor[:, :, stop:] = math.nan
        assert torch.equal(kernels.gqa_attention_masked(q, k, v, mask, 0.125), expected)


@pytest.mark.parametrize("length", [1, 40])
def test_any_scale(kernels, length):
    q, k, v = operands(1, 4, 2, length, 70, 64, torch.float32)
    for name in ("gqa_attention", "gqa_attention_causal"):
        attention = getattr(kernels, name)
        check(kernels, name, q, k, v, 3.0)
        check(kernels, name, q, k, v, 0.0)
        assert torch.equal(attention(q, k, v, -0.5), attention(-q, k, v, 0.5))


def test_scores_of_any_size_do_not_overflow(kernels):
    for dtype in DTYPES:
        q, k, v = operands(1, 2, 1, 1, 300, 64, dtype)
        q, k = 100 * q, 100 * k
        out = kernels.gqa_attention(q, k, v, 1.0)
        best = (q.double() @ k.double().transpose(-1, -2)).argmax(-1)[0, :, 0]
        torch.testing.assert_close(out[0, 0], v[0, 0, best], rtol=0, atol=1e-2)


def test_any_strides_give_the_same(kernels):
    for length in (1, 40):
        q, k, v = operands(2, 4, 2, length, 90, 64, torch.bfloat16)
        expected = kernels.gqa_attention(q, k, v, 0.125)
        packed = torch.cat((k, v), -1)
        assert torch.equal(kernels.gqa_attention(q.contiguous(), *packed.chunk(2, -1), 0.125), expected)
        wide = torch.stack((q, q), -1)[..., 0]
        assert torch.equal(kernels.gqa_attention(wide, k.mT.contiguous().mT, v, 0.125), expected)


@pytest.mark.parametrize(
    ("batch", "keys", "kernel"),
    [
        (1, 2048, "attention_combine_kernel"),
        (1, 64, "attention_decode_kernel"),
        (256, 2048, "attention_decode_kernel"),
    ],
)
def test_keys_are_shared_among_blocks_only_where_heads_are_too_few(kernels, batch, keys, kernel):
    make = {"dtype": torch.bfloat16, "device": "meta"}
    k = torch.empty(batch, 8, keys, 128, **make)
    with recorded() as launches:
        kernels.gqa_attention(torch.empty(batch, 32, 1, 128, **make), k, k, 0.1)
    assert launches[-1].kernel._pyfunc.__name__ == kernel


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("shares", [1, 2, 5, 33])
def test_any_number_of_blocks_may_share_the_keys(kernels, monkeypatch, shares, dtype, device):
    rule, step = kernels.choose_decode_tiling, 16 if dtype == FULL else 32
    monkeypatch.setattr(kernels, "choose_decode_tiling", lambda *sizes: replace(rule(*sizes), keys=step, shares=shares))
    for shape in ((2, 6, 2, 1, 1100, 64), (1, 4, 2, 3, 1090, 80), (1, 4, 2, 2, 70, 256)):
        batch, heads, _, length, keys, width = shape
        q, k, v = operands(*shape, dtype)
        check(kernels, "gqa_attention", q, k, v, 0.7 * width**-0.5, device=device)
        mask = masks(batch, heads, length, keys)["filled part of a cache"]
        check(kernels, "gqa_attention_masked", q, k, v, mask, width**-0.5, device=device)


@pytest.mark.parametrize(("shares", "blocks"), [(1, 1), (5, 5), (63, 32), (0, 8)])
def test_a_tiling_may_say_how_many_blocks_share_the_keys(kernels, shares, blocks):
    """No more than there are steps; where it does not say, as many as fill the GPU."""
    make = {"dtype": BRAIN, "device": "meta"}
    q, k, y = (torch.empty(4, *size, 128, **make) for size in ((32, 1), (8, 2048), (1, 32)))
    with recorded() as launches:
        kernels.run_decode(q, k, k, None, y, 0.1, kernels.Tiling(0, 64, 3, blocks=2, shares=shares))
    assert launches[0].grid == (32, blocks)


#: dtype, Hq, Hk, S, T, D, mask: None, "causal", or rows and dtype of a mask.
COMPILED = (
    (BRAIN, 32, 8, 2048, 2048, 128, "causal"), (BRAIN, 32, 8, 2048, 2048, 128, (2048, torch.bool)),
    (BRAIN, 4, 1, 512, 512, 256, "causal"), (BRAIN, 16, 16, 512, 512, 80, None),
    (BRAIN, 32, 8, 1, 4096, 128, (1, torch.bool)), (BRAIN, 28, 4, 1, 4096, 128, None),
    (BRAIN, 32, 8, 4, 4096, 96, (4, BRAIN)), (BRAIN, 71, 1, 1, 4096, 64, None),
    (HALF, 32, 8, 512, 512, 64, (1, HALF)), (FULL, 32, 8, 1, 4096, 64, (1, torch.bool)),
    (FULL, 32, 8, 128, 128, 64, "causal"),
)  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(kernels, arch):
    names = set()
    for case in COMPILED:
        for launch in launches_of(kernels, *case):
            assert compile_kernel(launch.kernel, launch.args, arch)
            names.add(launch.kernel._pyfunc.__name__)
    assert len(names) == 4


def test_a_step_of_decode_has_no_more_products_than_registers(kernels):
    """With heads of 16 or less 64 KiB hold thousands of keys, over which the compiler took minutes."""
    for width in (1, 3, 8, 16, 24, 32, 64, 128, 256):
        for rows in (16, 32, 64, 128):
            assert rows * kernels.choose_decode_tiling(width, 2, rows).keys <= kernels.MOST_SCORES
    assert [kernels.choose_decode_tiling(width, 2).keys for width in (32, 64, 128, 256)] == [1024, 512, 256, 64]
    assert kernels.choose_decode_tiling(64, 2, 128).keys == 128
