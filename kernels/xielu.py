"""xIELU in cuTile: y = where(x > 0, a x^2, b (exp(m) - 1 - x)) + beta x, m = min(x, eps), one rounding.

    a = softplus(alpha_p), b = beta + softplus(alpha_n)

exp(m) - 1 - x is (exp(m) - 1 - m) + (m - x); the first of them is a series for small |m|, where nearly equal numbers
would be subtracted. log(1 + t) for a small t is log(u) t / (u - 1) with u = 1 + t as rounded (Kahan), so that slopes
near zero keep their digits.

Tiles are those of activation.py: a contiguous operand is one long row, any other is copied to one, and a block takes
2048 elements. Slopes, beta and eps stay on the GPU and are read by every block.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .activation import MAX_LENGTH, TILE

#: Down to here a series; its last term left out is 1e-10 of the sum.
SERIES = -0.5
#: 1 / k! for k = 11 ... 2.
TERMS = (1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)


def softplus(x):
    t = ct.exp(-ct.abs(x))
    u = 1.0 + t
    lost = u == 1.0
    return ct.maximum(x, 0.0) + ct.where(lost, t, ct.log(u) * t / ct.where(lost, 1.0, u - 1.0))


def exponential_above_its_tangent(m):
    """exp(m) - 1 - m for m <= 0."""
    near = ct.maximum(m, SERIES)
    series = TERMS[0]
    for term in ct.static_iter(TERMS[1:]):
        series = series * near + term
    return ct.where(m < SERIES, ct.exp(m) - 1.0 - m, series * near * near)


def number(array):
    return ct.astype(ct.load(array, (0,), shape=(1,)), ct.float32)


def activated(x, alpha_p, alpha_n, beta, eps):
    m = ct.minimum(x, eps)
    above = softplus(alpha_p) * x * x
    below = (beta + softplus(alpha_n)) * (exponential_above_its_tangent(m) + (m - x))
    return ct.where(x > 0.0, above, below) + beta * x


@ct.kernel
def xielu_kernel(x, alpha_p, alpha_n, beta, eps, out, WIDTH: ct.Constant[int]):
    length = out.shape[1]
    tiles = ct.cdiv(length, WIDTH)
    row, k = ct.bid(0) // tiles, ct.bid(0) % tiles
    slopes = number(alpha_p), number(alpha_n), number(beta), number(eps)
    if (k + 1) * WIDTH <= length:
        tile = ct.reshape(ct.load(x, (row, k), shape=(1, WIDTH), check_bounds=False, allow_tma=False), (WIDTH,))
        result = activated(ct.astype(tile, ct.float32), slopes[0], slopes[1], slopes[2], slopes[3])
        result = ct.reshape(ct.astype(result, out.dtype), (1, WIDTH))
        ct.store(out, (row, k), result, check_bounds=False, allow_tma=False)
    else:
        columns = k * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        tile = ct.astype(ct.gather(x, (row, columns)), ct.float32)
        result = activated(tile, slopes[0], slopes[1], slopes[2], slopes[3])
        ct.scatter(out, (row, columns), ct.astype(result, out.dtype))


def xielu(
    hidden_states: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """A parabola above zero, an integrated exponential below, computed in float32 and rounded once.

    Args:
        hidden_states: Any shape and strides, float32, float16 or bfloat16; the result is contiguous.
        alpha_p: One number, whose softplus is the parabola's factor.
        alpha_n: One number, whose softplus plus `beta` is the exponential's factor.
        beta: One number, the slope at zero.
        eps: One number just below zero, at which the exponent ends.
    """
    out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    count = out.numel()
    if not count:
        return out
    width = hidden_states.shape[-1] if count > MAX_LENGTH else count
    shape = (count // width, width)
    tile = min(TILE, max(16, 1 << (width - 1).bit_length()))
    grid = (shape[0] * -(-width // tile),)
    numbers = (x.reshape(1) for x in (alpha_p, alpha_n, beta, eps))
    launch(xielu_kernel, grid, (hidden_states.reshape(shape), *numbers, out.view(shape), tile))
    return out
