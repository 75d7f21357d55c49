"""Causal convolutions: a prompt's and one token's, with and without bias and SiLU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand

NAMES = (
    "causal_conv1d", "causal_conv1d_silu", "causal_conv1d_bias_silu",
    "causal_conv1d_step", "causal_conv1d_step_silu", "causal_conv1d_step_bias_silu",
)  # fmt: skip
CHANNELS, TAPS = 12, 4
check = partial(check_pass, only=NAMES)


def prompt(x: Any, weight: Any, bias: Any = None, *, act: Any = F.silu, padding: int = TAPS - 1) -> Any:
    out = F.conv1d(x, weight=weight.unsqueeze(1), bias=bias, padding=padding, groups=CHANNELS)
    return act(out[:, :, : x.shape[-1]])


def step(window: Any, weight: Any, bias: Any = None, *, act: Any = F.silu, last: int = 1) -> Any:
    out = F.conv1d(window, weight.unsqueeze(1), bias, padding=0, groups=CHANNELS)[:, :, -last:]
    return act(out).to(window.dtype)


def taps(count: int = TAPS, **options: Any) -> torch.Tensor:
    return rand(CHANNELS, count, **options)


def plain(x: Any) -> Any:
    return x


@everywhere
def test_prompts(dtype: torch.dtype, dynamic: bool) -> None:
    x, weight, bias = rand(BATCH, CHANNELS, LENGTH, dtype=dtype), taps(dtype=dtype), rand(CHANNELS, dtype=dtype)
    run = partial(check, dynamic=dynamic, left=None)
    run(partial(prompt, act=plain), [x, weight], {"causal_conv1d": 1})
    run(prompt, [x, weight], {"causal_conv1d_silu": 1})
    run(prompt, [x, weight, bias], {"causal_conv1d_bias_silu": 1})


@everywhere
def test_steps(dtype: torch.dtype, dynamic: bool) -> None:
    window, weight, bias = rand(BATCH, CHANNELS, TAPS + 1, dtype=dtype), taps(dtype=dtype), rand(CHANNELS, dtype=dtype)
    run = partial(check, dynamic=dynamic, left=None)
    run(partial(step, act=plain), [window, weight], {"causal_conv1d_step": 1})
    run(step, [window, weight], {"causal_conv1d_step_silu": 1})
    run(step, [window, weight, bias], {"causal_conv1d_step_bias_silu": 1})


def test_a_prompt_that_comes_transposed_and_goes_back() -> None:
    code = lambda x, w, b: prompt(x.transpose(1, 2), w, b).transpose(1, 2)  # noqa: E731
    check(code, [rand(2, 9, CHANNELS), taps(), rand(CHANNELS)], {"causal_conv1d_bias_silu": 1}, left=None)


def test_the_window_is_written_back_to_the_state() -> None:
    """The state takes the window's last positions before the convolution reads the window."""

    def code(state: Any, new: Any, weight: Any) -> Any:
        window = torch.cat([state, new], dim=-1)
        state.copy_(window[:, :, -TAPS:])
        return step(window, weight)

    inputs = [rand(2, CHANNELS, TAPS), rand(2, CHANNELS, 1), taps()]
    check(code, inputs, {"causal_conv1d_step_silu": 1}, left=None)


@pytest.mark.parametrize("padding", [TAPS, TAPS - 2])
def test_near_miss_other_padding(padding: int) -> None:
    """One position more is seen into the past or into the future."""
    check(partial(prompt, padding=padding), [rand(2, CHANNELS, 9), taps()], {}, left=None)


def test_near_miss_channels_that_mix() -> None:
    def code(x: Any, weight: Any) -> Any:
        return F.silu(F.conv1d(x, weight, padding=TAPS - 1, groups=CHANNELS // 2)[..., : x.shape[-1]])

    check(code, [rand(2, CHANNELS, 9), rand(CHANNELS, 2, TAPS)], {}, left=None)


def test_near_miss_holes_between_taps() -> None:
    def code(x: Any, weight: Any) -> Any:
        out = F.conv1d(x, weight.unsqueeze(1), padding=TAPS - 1, dilation=2, groups=CHANNELS)
        return F.silu(out[..., : x.shape[-1]])

    check(code, [rand(2, CHANNELS, 9), taps()], {}, left=None)


def test_near_miss_another_activation() -> None:
    check(partial(prompt, act=torch.tanh), [rand(2, CHANNELS, 9), taps()], {"causal_conv1d": 1}, left=None)


def test_near_miss_several_new_tokens() -> None:
    check(partial(step, last=2), [rand(2, CHANNELS, TAPS + 1), taps()], {}, left=None)


@pytest.mark.parametrize(("code", "length"), [(prompt, 20), (step, 10)], ids=["prompt", "step"])
def test_guard_many_taps(code: Any, length: int) -> None:
    code = partial(code, padding=8) if code is prompt else code
    name = "causal_conv1d_silu" if length == 20 else "causal_conv1d_step_silu"
    check(code, [rand(2, CHANNELS, length), taps(9)], {}, left=None, refused={name: "9 taps"})
