"""Attention over cached latents against float64, interpreted and on a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, ROWS, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAME = "latent_attention_masked"
NARROW = (torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
#: Small versions of two models' heads, odd widths, several blocks of heads, several blocks for one head's tokens.
SIZES = (
    {"Hq": 4, "D": 16, "R": 8, "L": 32, "V": 16, "T": 150},
    {"Hq": 7, "D": 20, "R": 6, "L": 40, "V": 12, "T": 300, "B": 1},
    {"Hq": 70, "D": 16, "R": 8, "L": 24, "V": 8, "T": 70, "B": 1},
    {"Hq": 3, "D": 12, "R": 4, "L": 18, "V": 33, "T": 5},
)
#: What hides a token: False, or a number that is added. float16's least number is none that takes away every score.
HIDING = ((False, torch.bfloat16), (False, torch.float16), (-math.inf, torch.bfloat16), (-math.inf, torch.float16),
          (torch.finfo(torch.bfloat16).min, torch.bfloat16))  # fmt: skip

Inputs = dict[str, Any]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return sys.modules[INVENTORY.entry_point(NAME).__module__]


def on(device: str, function: Callable[..., torch.Tensor], **inputs: Any) -> torch.Tensor:
    return function(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}).cpu()


def inputs_of(dtype: torch.dtype, rows: str = "ordinary", float_mask: bool = False, **sizes: int) -> Inputs:
    return make_inputs(NAME, dtype, rows, "as trained", sizes, float_mask)


def exact(inputs: Inputs) -> torch.Tensor:
    """The reference in float64."""
    floats = {k: v.double() for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return INVENTORY.reference(NAME)(**{**inputs, **floats})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 20])
def test_agrees_with_float64_for_few_queries_and_many(length: int, dtype: torch.dtype, device: str) -> None:
    run = partial(on, device, INVENTORY.entry_point(NAME))
    for sizes in SIZES:
        for rows in ROWS if length == 1 else ("ordinary",):
            for float_mask in (False, True):
                inputs = inputs_of(dtype, rows, float_mask, S=length, **sizes)
                assert worst(run, NAME, inputs, dtype) <= 1, sizes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sums_of_hundreds_of_latents_that_cancel_are_as_exact_as_expanded_values(
    kernels: ModuleType, dtype: torch.dtype, device: str
) -> None:
    """Rounded, attended latents of a real model's width give results near zero that are off by 20 times as much."""
    for tokens in (13, 150):
        inputs = inputs_of(dtype, Hq=16, D=128, R=64, L=512, V=128, S=1, T=tokens)
        errors = [worst(partial(on, device, f), NAME, inputs, dtype)
                  for f in (kernels.absorbed_attention, kernels.expanded_attention)]  # fmt: skip
        assert errors[0] <= 3 * errors[1]


@pytest.mark.parametrize("length", [1, 3, 8])
def test_in_float32_the_absorbed_form_is_the_definition_to_its_last_digits(kernels: ModuleType, length: int) -> None:
    for sizes in SIZES:
        inputs = inputs_of(torch.float32, S=length, **sizes)
        right = exact(inputs)
        torch.testing.assert_close(kernels.absorbed_attention(**inputs).double(), right, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(kernels.absorbed_attention(**inputs | {"scale": 0.29}).double(), right, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hiding", "dtype"), HIDING, ids=str)
@pytest.mark.parametrize("length", [1, 3])
def test_tokens_that_a_static_cache_hides_at_either_end_are_not_read(
    hiding: float, length: int, dtype: torch.dtype, device: str
) -> None:
    """The first sequence is padded on the left, and neither has filled the cache; what is hidden holds NaN."""
    inputs = inputs_of(dtype, S=length, T=500, D=16, R=8, L=32, V=16)
    place = torch.arange(500)
    starts, reach = torch.tensor([130, 0])[:, None, None, None], torch.arange(300, 300 + length)[:, None]
    seen = (place >= starts) & (place <= reach)
    clean = inputs | {"mask": hidden(seen, hiding, dtype)}
    dirty = {name: tensor.clone() for name, tensor in clean.items() if name in ("latents", "k_pe")}
    for tensor in dirty.values():
        tensor[0, :, :128] = math.nan
        tensor[:, :, 384:] = math.nan
    run = partial(on, device, INVENTORY.entry_point(NAME))
    assert worst(run, NAME, clean, dtype) <= 1
    assert torch.equal(run(**clean | dirty), run(**clean))


def hidden(seen: torch.Tensor, hiding: float, dtype: torch.dtype) -> torch.Tensor:
    """A mask: boolean, or what is added where a token is not seen."""
    return seen if hiding is False else torch.where(seen, 0.0, hiding).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hiding", "dtype"), HIDING, ids=str)
@pytest.mark.parametrize("length", [1, 3])
def test_a_query_without_tokens_gives_nothing_and_under_the_least_number_their_mean(
    hiding: float, length: int, dtype: torch.dtype, device: str
) -> None:
    inputs = inputs_of(dtype, S=length, T=200)
    seen = torch.ones(2, 1, length, 200, dtype=torch.bool)
    seen[1, :, 0] = False
    got = on(device, INVENTORY.entry_point(NAME), **inputs | {"mask": hidden(seen, hiding, dtype)})
    alike = exact(inputs | {"mask": torch.ones_like(seen), "scale": 0.0})[1, 0]
    expected = torch.zeros_like(alike) if hiding in (False, -math.inf) else alike
    torch.testing.assert_close(got[1, 0].double(), expected, rtol=2**-6, atol=2**-8)
    others = exact(inputs | {"mask": torch.ones_like(seen)})[0]
    torch.testing.assert_close(got[0].double(), others, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_may_be_negative_or_nothing(kernels: ModuleType, scale: float) -> None:
    inputs = inputs_of(torch.float32, S=1, T=90) | {"scale": scale}
    torch.testing.assert_close(kernels.absorbed_attention(**inputs).double(), exact(inputs), rtol=1e-5, atol=1e-5)


def test_one_mask_serves_the_whole_batch_and_strides_are_free() -> None:
    inputs = inputs_of(torch.bfloat16, B=3, S=2, T=90, D=16, R=8, L=32)
    inputs["mask"] = inputs["mask"][:1]
    expected = INVENTORY.entry_point(NAME)(**inputs | {"mask": inputs["mask"].repeat(3, 1, 1, 1)})
    assert torch.equal(INVENTORY.entry_point(NAME)(**inputs), expected)
    joint = torch.cat((inputs["latents"], inputs["k_pe"]), -1)
    queries = torch.cat((inputs["q_nope"], inputs["q_pe"]), -1).transpose(1, 2).contiguous().transpose(1, 2)
    views = {
        "latents": joint[..., :32], "k_pe": joint[..., 32:], "q_nope": queries[..., :16], "q_pe": queries[..., 16:],
        "kv_weight": inputs["kv_weight"].t().contiguous().t(),
    }  # fmt: skip
    assert torch.equal(INVENTORY.entry_point(NAME)(**inputs | views), expected)
    for name in ("q_nope", "q_pe", "latents", "k_pe"):
        turned = inputs[name].mT.contiguous().mT
        assert torch.equal(INVENTORY.entry_point(NAME)(**inputs | {name: turned}), expected)


def launched(length: int, tokens: int, heads: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """What is launched at the sizes of a real model."""
    make = partial(torch.empty, dtype=dtype, device="meta")
    q = make(batch, length, heads, 192).transpose(1, 2)
    mask = torch.empty(batch, 1, length, tokens, dtype=torch.bool, device="meta")
    latents, k_pe = make(batch, 1, tokens, 512), make(batch, 1, tokens, 64)
    with recorded() as launches:
        INVENTORY.entry_point(NAME)(q[..., :128], q[..., 128:], latents, k_pe, make(heads * 256, 512), mask, 0.1)
    return launches


def names(launches: list[Any]) -> list[str]:
    return [launch.kernel._pyfunc.__name__ for launch in launches]


def test_few_queries_expand_nothing_and_blocks_share_the_tokens() -> None:
    launches = launched(1, 2048, 16)
    assert names(launches) == [
        "latent_product_kernel", "latent_decode_kernel", "latent_combine_kernel", "latent_product_kernel",
    ]  # fmt: skip
    assert [launch.grid for launch in launches] == [(1, 8, 16), (1, 32), (16, 4, 1), (1, 2, 16)]


def test_many_sequences_need_no_second_launch_for_their_sums() -> None:
    assert names(launched(1, 2048, 16, batch=200)) == [
        "latent_product_kernel", "latent_decode_kernel", "latent_product_kernel",
    ]  # fmt: skip


def test_heads_that_do_not_fit_one_block_are_shared_by_several() -> None:
    assert launched(1, 2048, 128)[1].grid == (4, 32)
    assert launched(8, 2048, 128)[1].grid[0] == 32


@pytest.mark.parametrize(("length", "dtype"), [(9, torch.bfloat16), (1, torch.float32)], ids=str)
def test_prompts_and_float32_take_the_author_s_order(length: int, dtype: torch.dtype) -> None:
    found = names(launched(length, 2048, 16, dtype=dtype))
    assert not any(name.startswith("latent") for name in found)
    assert found.count("concat_kernel") == 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch: str) -> None:
    place = ARCHITECTURES.index(arch)
    length, heads = ((1, 16), (3, 16), (1, 128), (8, 128))[place % 4]
    for launch in launched(length, 2048, heads, dtype=NARROW[place % 2]):
        assert compile_kernel(launch.kernel, launch.args, arch)
