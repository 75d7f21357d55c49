"""Mamba2's states over a prompt, over one position, and what is read from them, in cuTile.

    s[t] = exp(A * dt[t]) * s[t - 1] + dt[t] * x[t] * B[t]        y[t] = C[t] . s[t] + D * x[t]        A = -exp(A_log)

s has a row of states for each column of a head; B and C are shared by the heads of a group.

A prompt. The columns of a head do not meet, so a block owns COLUMNS of them with their states in registers, and walks
along the prompt, ROWS positions at a time. Inside these, with f[t] the sum of A * dt from their first to t,

    y[t] = sum over u <= t of (C[t] . B[u]) * exp(f[t] - f[u]) * dt[u] * x[u]  +  exp(f[t]) * C[t] . s  +  D * x[t]

so that all but the sum f is a product of matrices. `ct.mma` in float32 is unrolled; instead the matrix units take a
float32 tile as three bfloat16 tiles that add up to it, and x, B and C as one or two where they have 16 bits. Of the
products of two splits those below the last place of float32 are left out.

One position. A block owns some columns of a head with all their states, and passes over them once.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

Int = ct.Constant[int]

#: Positions that a block takes at once.
ROWS = 64
#: Bfloat16 tiles that add up to a float32 tile.
WHOLE = 3
#: States that a block holds, for a prompt and for one position.
HELD, PASSED = 4096, 2048
#: Beyond it softplus is the identity in float32.
LINEAR = 20.0
ZERO = ct.PaddingMode.ZERO


def softplus(x):
    """log(1 + exp(x)), with all its digits where exp(x) is tiny."""
    grown = ct.exp(ct.minimum(x, LINEAR))
    whole = 1.0 + grown
    small = ct.where(whole == 1.0, grown, ct.log(whole) * (grown / ct.where(whole == 1.0, 1.0, whole - 1.0)))
    return ct.where(x > LINEAR, x, small)


def rounded(tile, dtype):
    return ct.astype(ct.astype(tile, dtype), ct.float32)


def step_of(dt, bias, dtype):
    """The step before its limits, rounded as often as its author does."""
    return rounded(softplus(rounded(ct.astype(dt, ct.float32) + rounded(bias, dtype), dtype)), dtype)


def count_of(dtype):
    """How many bfloat16 tiles add up to a tile of this dtype."""
    return 1 if dtype == ct.bfloat16 else 2 if dtype == ct.float16 else WHOLE


def split(tile, count):
    """A tile as a sum of bfloat16 tiles, the largest first."""
    parts, rest = (), ct.astype(tile, ct.float32)
    for _ in ct.static_iter(range(count)):
        part = ct.astype(rest, ct.bfloat16)
        parts += (part,)
        rest = rest - ct.astype(part, ct.float32)
    return parts


def product(left, lefts, right, rights, sums):
    """sums + left @ right, both split."""
    for i in ct.static_iter(range(lefts)):
        for j in ct.static_iter(range(rights)):
            if i + j < WHOLE:
                sums = ct.mma(left[i], right[j], sums)
    return sums


def turned(parts, count):
    """The tiles transposed."""
    made = ()
    for i in ct.static_iter(range(count)):
        made += (ct.transpose(parts[i]),)
    return made


@ct.kernel
def mamba2_scan_kernel(
    x, dt, decay, inward, outward, skip, bias, out, state, least, most,
    SHARED: Int, ROWS: Int, COLUMNS: Int, STATES: Int,
):  # fmt: skip
    batch, head, part = ct.bid(2), ct.bid(1), ct.bid(0)
    group, length = head // SHARED, x.shape[1]
    rate = -ct.exp(ct.astype(ct.gather(decay, head), ct.float32))
    share = ct.astype(ct.gather(skip, head), ct.float32)
    own_bias = ct.gather(bias, head)
    row, column = ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1)), ct.arange(ROWS, dtype=ct.int32)
    count = count_of(x.dtype)
    held = ct.zeros((STATES, COLUMNS), ct.float32)
    for k in range(ct.cdiv(length, ROWS)):
        place = k * ROWS + column
        step = step_of(ct.gather(dt, (batch, place, head)), own_bias, dt.dtype)
        step = rounded(ct.minimum(ct.maximum(step, least), most), dt.dtype)
        step = ct.where(place < length, step, 0.0)
        sums = ct.cumsum(rate * step, axis=0)
        last = ct.sum(rate * step, axis=0)
        values = ct.load(x, (batch, k, head, part), shape=(1, ROWS, 1, COLUMNS), padding_mode=ZERO)
        values = ct.reshape(values, (ROWS, COLUMNS))
        into = ct.load(inward, (batch, k, group, 0), shape=(1, ROWS, 1, STATES), padding_mode=ZERO)
        into = split(ct.reshape(into, (ROWS, STATES)), count)
        away = ct.load(outward, (batch, k, group, 0), shape=(1, ROWS, 1, STATES), padding_mode=ZERO)
        away = split(ct.reshape(away, (ROWS, STATES)), count)
        into_turned = turned(into, count)
        scores = product(away, count, into_turned, count, ct.zeros((ROWS, ROWS), ct.float32))
        gap = ct.minimum(ct.reshape(sums, (ROWS, 1)) - ct.reshape(sums, (1, ROWS)), 0.0)
        scores = scores * ct.exp(gap) * ct.reshape(step, (1, ROWS))
        scores = split(ct.where(row >= ct.reshape(column, (1, ROWS)), scores, 0.0), WHOLE)
        read = product(away, count, split(held, WHOLE), WHOLE, ct.zeros((ROWS, COLUMNS), ct.float32))
        read = read * ct.reshape(ct.exp(sums), (ROWS, 1))
        read = product(scores, WHOLE, split(values, count), count, read)
        read = read + share * ct.astype(values, ct.float32)  # last: the matrix units truncate what they add to
        ct.store(out, (batch, k, head, part), ct.reshape(read, (1, ROWS, 1, COLUMNS)))
        fading = ct.astype(values, ct.float32) * ct.reshape(step * ct.exp(last - sums), (ROWS, 1))
        held = product(into_turned, count, split(fading, WHOLE), WHOLE, held * ct.exp(last))
    ct.store(state, (batch, head, part, 0), ct.reshape(ct.transpose(held), (1, 1, COLUMNS, STATES)))


@ct.kernel
def mamba2_step_kernel(
    state, x, dt, decay, inward, bias, out, SHARED: Int, COLUMNS: Int, STATES: Int
):  # fmt: skip
    batch, head, part = ct.bid(2), ct.bid(1), ct.bid(0)
    step = step_of(ct.gather(dt, (batch, head)), ct.gather(bias, head), dt.dtype)
    fading = ct.exp(-step * ct.exp(ct.astype(ct.gather(decay, head), ct.float32)))
    held = ct.load(state, (batch, head, part, 0), shape=(1, 1, COLUMNS, STATES), padding_mode=ZERO)
    values = ct.load(x, (batch, head, part), shape=(1, 1, COLUMNS), padding_mode=ZERO)
    into = ct.load(inward, (batch, head // SHARED, 0), shape=(1, 1, STATES), padding_mode=ZERO)
    entering = step * ct.astype(ct.reshape(into, (1, 1, 1, STATES)), ct.float32)
    entering = entering * ct.astype(ct.reshape(values, (1, 1, COLUMNS, 1)), ct.float32)
    ct.store(out, (batch, head, part, 0), ct.astype(ct.astype(held, ct.float32) * fading + entering, out.dtype))


@ct.kernel
def mamba2_readout_kernel(state, x, outward, skip, out, SHARED: Int, COLUMNS: Int, STATES: Int):
    batch, head, part = ct.bid(2), ct.bid(1), ct.bid(0)
    held = ct.load(state, (batch, head, part, 0), shape=(1, 1, COLUMNS, STATES), padding_mode=ZERO)
    values = ct.load(x, (batch, head, part), shape=(1, 1, COLUMNS), padding_mode=ZERO)
    away = ct.load(outward, (batch, head // SHARED, 0), shape=(1, 1, STATES), padding_mode=ZERO)
    away = ct.astype(ct.reshape(away, (1, 1, 1, STATES)), ct.float32)
    read = ct.sum(ct.astype(held, ct.float32) * away, axis=3)
    share = ct.astype(ct.gather(skip, head), ct.float32)
    ct.store(out, (batch, head, part), ct.astype(read + share * ct.astype(values, ct.float32), out.dtype))


def _columns(width: int, states: int, held: int) -> int:
    """Columns of a head that a block takes: as many as leave its states few enough."""
    return max(min(covering_power(width), held // states), 1)


def mamba2_scan(
    x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
    dt_bias: torch.Tensor, chunk_size: int, least: float, most: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Mamba2 over a whole prompt from states of zero.

    Args:
        x: [B, L, H, P], any strides, float32, float16 or bfloat16.
        dt: [B, L, H], the steps before their bias and softplus.
        A_log: [H].
        B: [B, L, G, N], H a multiple of G.
        C: The same shape.
        D: [H].
        dt_bias: [H].
        chunk_size: How many positions the author's code takes at once; it changes no value.
        least: Smallest step.
        most: Largest step.

    Returns:
        What is read at every position, [B, L, H, P], and the last states, [B, H, P, N], both float32.
    """
    batch, _, heads, width = x.shape
    groups, states = B.shape[2:]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    state = torch.empty((batch, heads, width, states), dtype=torch.float32, device=x.device)
    if not state.numel():
        return out, state
    tile = covering_power(states)
    columns = _columns(width, tile, HELD)
    grid = (-(-width // columns), heads, batch)
    sizes = (heads // groups, ROWS, columns, tile)
    launch(mamba2_scan_kernel, grid, (x, dt, A_log, B, C, D, dt_bias, out, state, least, most, *sizes))
    return out, state


def _at_one_position(state: torch.Tensor, shared: torch.Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and sizes of a pass over the states."""
    batch, heads, width, states = state.shape
    tile = covering_power(states)
    columns = _columns(width, tile, PASSED)
    return (-(-width // columns), heads, batch), (heads // shared.shape[1], columns, tile)


def mamba2_step(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, B: torch.Tensor, dt_bias: torch.Tensor
) -> torch.Tensor:
    """The states one position later.

    Args:
        state: [B, H, P, N], any strides.
        x: [B, H, P] or another shape with these elements, float32, float16 or bfloat16.
        dt: [B, 1, H], the step before its bias and softplus.
        A_log: [H].
        B: [B, G, N] or another shape with these elements.
        dt_bias: [H].
    """
    batch, heads, width, states = state.shape
    out = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    if out.numel():
        inward = B.reshape(batch, -1, states)
        grid, sizes = _at_one_position(state, inward)
        args = (state, x.reshape(batch, heads, width), dt.select(1, 0), A_log, inward, dt_bias, out)
        launch(mamba2_step_kernel, grid, (*args, *sizes))
    return out


def mamba2_readout(state: torch.Tensor, x: torch.Tensor, C: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
    """What is read from the states at one position, [B, H, P]; arguments as above, C like B and D [H]."""
    batch, heads, width, states = state.shape
    out = torch.empty((batch, heads, width), dtype=x.dtype, device=x.device)
    if out.numel():
        outward = C.reshape(batch, -1, states)
        grid, sizes = _at_one_position(state, outward)
        launch(mamba2_readout_kernel, grid, (state, x.reshape(out.shape), outward, D, out, *sizes))
    return out
