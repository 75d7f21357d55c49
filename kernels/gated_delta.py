"""The gated delta rule at one position, and how fast its states fade, in cuTile.

    S = exp(g) * S         S has a row for each column of a key, a column for each of a value
    S = S + k (beta * (v - k . S))^T
    y = q . S / sqrt(columns of a key)                            with q and k scaled to length one

    g = -exp(A_log) * softplus(a + dt_bias)

A block owns some columns of a head's values with all rows of their states: what the columns hold of each other never
meets. It passes over the states once, in float32. As many heads as a group has share a key and a query.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

from .mamba2 import ZERO, softplus

Int = ct.Constant[int]

#: States that a block holds.
HELD = 4096
#: Elements of a block where one follows from one.
TILE = 1024


def of_length_one(rows, batch, head, width, eps):
    """A key or a query as a column."""
    tile = ct.load(rows, (batch, 0, head, 0), shape=(1, 1, 1, width), padding_mode=ZERO)
    tile = ct.astype(ct.reshape(tile, (width, 1)), ct.float32)
    return tile * ct.rsqrt(ct.sum(tile * tile, axis=0, keepdims=True) + eps)


@ct.kernel
def gated_delta_step_kernel(
    q, k, v, decay, beta, state, out, after, eps, root, SHARED: Int, KEY: Int, COLUMNS: Int
):  # fmt: skip
    batch, head, part = ct.bid(2), ct.bid(1), ct.bid(0)
    key = of_length_one(k, batch, head // SHARED, KEY, eps)
    query = of_length_one(q, batch, head // SHARED, KEY, eps) / root
    held = ct.load(state, (batch, head, 0, part), shape=(1, 1, KEY, COLUMNS), padding_mode=ZERO)
    held = ct.reshape(held, (KEY, COLUMNS)) * ct.exp(ct.astype(ct.gather(decay, (batch, 0, head)), ct.float32))
    value = ct.load(v, (batch, 0, head, part), shape=(1, 1, 1, COLUMNS), padding_mode=ZERO)
    change = ct.astype(ct.reshape(value, (1, COLUMNS)), ct.float32) - ct.sum(held * key, axis=0, keepdims=True)
    held = held + key * (change * ct.astype(ct.gather(beta, (batch, 0, head)), ct.float32))
    ct.store(after, (batch, head, 0, part), ct.reshape(held, (1, 1, KEY, COLUMNS)))
    ct.store(out, (batch, head, part), ct.reshape(ct.sum(held * query, axis=0), (1, 1, COLUMNS)))


@ct.kernel
def delta_decay_kernel(a, rate, bias, out, ROWS: Int, COLUMNS: Int):
    row = ct.reshape(ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32), (ROWS, 1))
    column = ct.reshape(ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    step = ct.astype(ct.gather(a, (row, column)), ct.float32) + ct.astype(ct.gather(bias, column), ct.float32)
    ct.scatter(out, (row, column), -ct.exp(ct.astype(ct.gather(rate, column), ct.float32)) * softplus(step))


def gated_delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gated delta rule at one position.

    Args:
        q: [B, 1, Hk, D], any strides, float32, float16 or bfloat16.
        k: The same shape.
        v: [B, 1, Hv, Dv], Hv a multiple of Hk.
        decay: [B, 1, Hv], the logarithm of what is left of the states.
        beta: [B, 1, Hv].
        state: [B, Hv, D, Dv], float32.
        eps: Added to the square of the length of a query and a key.

    Returns:
        What the queries read, [B, Hv, Dv], and the states after it, both float32.
    """
    batch, heads, width, columns = state.shape
    out = torch.empty((batch, heads, columns), dtype=torch.float32, device=state.device)
    after = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    if not width:
        out.zero_()
    elif after.numel():
        key = covering_power(width)
        tile = min(covering_power(columns), max(HELD // key, 1))
        grid = (-(-columns // tile), heads, batch)
        sizes = (heads // k.shape[2], key, tile)
        launch(gated_delta_step_kernel, grid, (q, k, v, decay, beta, state, out, after, eps, width**0.5, *sizes))
    return out, after


def delta_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Logarithm of what one position leaves of the states, in float32.

    Args:
        a: [..., heads], float32, float16 or bfloat16.
        A_log: [heads].
        dt_bias: [heads].
    """
    out = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    if out.numel():
        rows = a.reshape(-1, a.shape[-1])
        width = min(covering_power(rows.shape[1]), TILE)
        height = min(covering_power(rows.shape[0]), TILE // width)
        grid = (-(-rows.shape[0] // height), -(-rows.shape[1] // width))
        launch(delta_decay_kernel, grid, (rows, A_log, dt_bias, out.view(rows.shape), height, width))
    return out
