"""Plain activations in cuTile: y = act(x) with one rounding, act among GELU (erf form), GELU (tanh form),
ReLU and squared ReLU; SiLU is here for the gated ones.

    silu(x)         = x / (1 + exp(-x))
    gelu(x)         = max(x, 0) - |x| * Phi(-|x|), Phi the normal distribution
    gelu_tanh(x)    = x / (1 + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715 x^3); equals 0.5 x (1 + tanh(u))
    relu(x)         = max(x, 0)
    relu_squared(x) = max(x, 0)^2

Neither GELU subtracts nearly equal numbers, so both keep their digits for large negative x. Phi(-a) is
exp(-a^2 / 2) * t * P(t) with t = 1 / (1 + 0.3 a), the shape of Abramowitz and Stegun 7.1.26 with a polynomial
of degree 7 fitted to the smallest relative error, 1.5e-7 for 0 <= a <= 14 (cuTile has no erf).

Tiles. A contiguous operand is one long row, any other is copied to one. A block takes 2048 elements. For
2-byte inputs division is approximate and exp2 flushes; float32 takes the exact forms.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

SILU = 0
GELU_TANH = 1
GELU = 2
RELU = 3
RELU_SQUARED = 4

#: Elements of one block.
TILE = 2048
#: Longest dimension that a kernel indexes with 32 bits.
MAX_LENGTH = 2**31 - 1

LOG2_E = 1.4426950408889634
TWICE_ROOT = 1.5957691216057308  # 2 * sqrt(2 / pi)
#: Where Phi(-a) has long been zero in float32; beyond it inf * 0 would be a NaN.
TAIL_ENDS = 16.0
#: Coefficients of P, highest power first.
TAIL = (
    0.03567484410792854, -0.15720335906313818, 0.2063539482841781, -0.05368401305839104,
    0.12856179900448342, 0.09991344727377267, 0.12075396200097527, 0.11962929849781213,
)  # fmt: skip


def exp(x, exact):
    return ct.exp(x) if exact else ct.exp2(x * LOG2_E, flush_to_zero=True)


def divide(x, y, exact):
    if exact:
        return ct.truediv(x, y, rounding_mode=ct.RoundingMode.FULL)
    return ct.truediv(x, y, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


def normal_tail(a, exact):
    """Phi(-a) for a >= 0."""
    t = divide(1.0, 1.0 + 0.3 * a, exact)
    series = TAIL[0]
    for coefficient in ct.static_iter(TAIL[1:]):
        series = series * t + coefficient
    return exp(-0.5 * a * a, exact) * t * series


def activation(x, kind, exact):
    """act(x) of a float32 tile."""
    if kind == SILU:
        return divide(x, 1.0 + exp(-x, exact), exact)
    if kind == GELU:
        size = ct.minimum(ct.abs(x), TAIL_ENDS, propagate_nan=True)
        return ct.maximum(x, 0.0, propagate_nan=True) - size * normal_tail(size, exact)
    if kind == GELU_TANH:
        twice = TWICE_ROOT * (x + 0.044715 * x * x * x)
        return divide(x, 1.0 + exp(-twice, exact), exact)
    positive = ct.maximum(x, 0.0, propagate_nan=True)
    return positive if kind == RELU else positive * positive


@ct.kernel
def activation_kernel(x, out, KIND: ct.Constant[int], WIDTH: ct.Constant[int]):
    length = out.shape[1]
    tiles = ct.cdiv(length, WIDTH)
    row, k = ct.bid(0) // tiles, ct.bid(0) % tiles
    exact = x.dtype == ct.float32
    if (k + 1) * WIDTH <= length:
        tile = ct.astype(ct.load(x, (row, k), shape=(1, WIDTH), check_bounds=False, allow_tma=False), ct.float32)
        result = ct.astype(activation(tile, KIND, exact), out.dtype)
        ct.store(out, (row, k), result, check_bounds=False, allow_tma=False)
    else:
        columns = k * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        tile = ct.astype(ct.gather(x, (row, columns)), ct.float32)
        ct.scatter(out, (row, columns), ct.astype(activation(tile, KIND, exact), out.dtype))


def _activated(x: torch.Tensor, kind: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = out.numel()
    if not count:
        return out
    width = x.shape[-1] if x.dim() and count > MAX_LENGTH else count
    shape = (count // width, width)
    tile = min(TILE, max(16, 1 << (width - 1).bit_length()))
    grid = (shape[0] * -(-width // tile),)
    launch(activation_kernel, grid, (x.reshape(shape), out.view(shape), kind, tile))
    return out


def gelu(hidden_states: torch.Tensor) -> torch.Tensor:
    """GELU by the normal distribution.

    Args:
        hidden_states: Any shape and strides, float32, float16 or bfloat16; the result is contiguous.
    """
    return _activated(hidden_states, GELU)


def gelu_tanh(hidden_states: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh approximation; arguments as for `gelu`."""
    return _activated(hidden_states, GELU_TANH)


def relu(hidden_states: torch.Tensor) -> torch.Tensor:
    """max(x, 0); arguments as for `gelu`."""
    return _activated(hidden_states, RELU)


def relu_squared(hidden_states: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared, rounded once; arguments as for `gelu`."""
    return _activated(hidden_states, RELU_SQUARED)
