"""Causal depthwise convolution over positions, with its bias and SiLU, in cuTile.

    y[b, c, t] = act(bias[c] + sum over taps j of weight[c, j] * x[b, c, t + first + j])

Every channel is a row of its own, and x is zero before its first position. For a whole prompt `first` is 1 - taps:
the last tap meets the position itself. For one new token x is the window that the state and the token make, and
`first` is where its last taps begin.

Tiles. A block owns CHANNELS x POSITIONS results and gathers x once for each tap: all but the first come from the
cache. Along the dimension of x with stride 1 a tile is long, so that neighbouring threads read neighbouring elements.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

Int = ct.Constant[int]
Flag = ct.Constant[bool]

#: Elements of one block, and how many of them lie along the dimension that memory is dense in.
TILE, DENSE = 1024, 128


@ct.kernel
def causal_conv1d_kernel(
    x, weight, bias, out, first, TAPS: Int, BIAS: Flag, SILU: Flag, CHANNELS: Int, POSITIONS: Int
):  # fmt: skip
    batch, block = ct.bid(1), ct.bid(0)
    across = ct.cdiv(x.shape[1], CHANNELS)
    channel = ct.reshape(block % across * CHANNELS + ct.arange(CHANNELS, dtype=ct.int32), (CHANNELS, 1))
    position = ct.reshape(block // across * POSITIONS + ct.arange(POSITIONS, dtype=ct.int32), (1, POSITIONS))
    total = ct.zeros((CHANNELS, POSITIONS), ct.float32)
    if BIAS:
        total = total + ct.astype(ct.gather(bias, channel), ct.float32)
    for tap in ct.static_iter(range(TAPS)):
        scale = ct.astype(ct.gather(weight, (channel, tap)), ct.float32)
        total = total + scale * ct.astype(ct.gather(x, (batch, channel, position + (first + tap))), ct.float32)
    if SILU:
        total = total / (1.0 + ct.exp(-total))
    ct.scatter(out, (batch, channel, position), ct.astype(total, out.dtype))


def _tile(x: torch.Tensor, positions: int) -> tuple[int, int]:
    """Channels and positions of one block."""
    width = min(TILE, 1 << (positions - 1).bit_length())
    width = min(width, DENSE if x.stride(2) == 1 else TILE // DENSE)
    return TILE // width, width


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, positions: int, first: int
) -> torch.Tensor:
    batch, channels, _ = x.shape
    out = torch.empty((batch, channels, positions), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    height, width = _tile(x, positions)
    grid = (-(-channels // height) * -(-positions // width), batch)
    taps = weight.squeeze(1)
    flags = (taps.shape[1], bias is not None, silu)
    # A kernel takes no None; it does not read the bias then.
    launch(causal_conv1d_kernel, grid, (x, taps, taps if bias is None else bias, out, first, *flags, height, width))
    return out


def _prompt(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    return _convolved(x, weight, bias, silu, x.shape[2], 1 - weight.shape[2])


def _step(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    return _convolved(window, weight, bias, silu, 1, window.shape[2] - weight.shape[2])


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of a prompt, summed in float32 and rounded once.

    Args:
        x: [B, C, L], any strides, float32, float16 or bfloat16; the result is contiguous.
        weight: [C, 1, K].
    """
    return _prompt(x, weight, None, False)


def causal_conv1d_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with SiLU before it is rounded."""
    return _prompt(x, weight, None, True)


def causal_conv1d_bias_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same with a bias [C] and SiLU."""
    return _prompt(x, weight, bias, True)


def causal_conv1d_step(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution at the last position of a window.

    Args:
        window: [B, C, W], any strides; the positions before the new one, then that one. W is K or more.
        weight: [C, 1, K].

    Returns:
        [B, C, 1].
    """
    return _step(window, weight, None, False)


def causal_conv1d_step_silu(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with SiLU before it is rounded."""
    return _step(window, weight, None, True)


def causal_conv1d_step_bias_silu(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same with a bias [C] and SiLU."""
    return _step(window, weight, bias, True)
