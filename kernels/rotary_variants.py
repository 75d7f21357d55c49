"""Rotary embeddings other than the plain half-split one, in one cuTile kernel.

    out[j] = x[own(j)] * cos[j mod A] -+ x[partner(j)] * sin[j mod A]    for j < R
    out[j] = x[j]                                                        for j >= R

R columns of a head are rotated and the rest passes through. A is the number of columns of cos and sin that
are read: R, or R / 2 where both halves share them. The sign is minus for the first member of a pair.

    layout            own(j)                 partner(j)             first member
    HALVES            j                      j + R/2, j - R/2       j < R/2
    PAIRS             j                      j + 1, j - 1           even j
    PAIRS_TO_HALVES   2 (j mod R/2) + high   2 (j mod R/2) + low    j < R/2

Here high is 1 for j >= R/2, else 0, and low the other way round. Complex numbers are PAIRS of which both members
read the same column of cos and sin, j / 2 instead of j mod A.

Tiles. A block takes HEADS heads at POSITIONS positions, all columns of a head at once; each value of cos and
sin is loaded once for HEADS heads. x is gathered twice, the second time from the cache lines of the first.
Blocks after the last group of query heads take the keys. Strides are read as they are.
"""

from __future__ import annotations

from functools import lru_cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch

HALVES = 0
PAIRS = 1
PAIRS_TO_HALVES = 2
COMPLEX = 3

#: Elements of one block.
BLOCK = 4096
#: Heads that share one load of cos and sin.
MAX_HEADS = 8

Int = ct.Constant[int]
Flag = ct.Constant[bool]


def sources(column, layout, width):
    """Which column of x is kept and which is turned in, and whether the column is the first of its pair."""
    half = width // 2
    if layout == HALVES:
        first = column < half
        return column, ct.where(first, column + half, column - half), first
    if layout != PAIRS_TO_HALVES:
        first = column % 2 == 0
        return column, ct.where(first, column + 1, column - 1), first
    first = column < half
    even = 2 * (column % half)
    return ct.where(first, even, even + 1), ct.where(first, even + 1, even), first


def product(x, factor, dtype):
    """x * factor rounded to `dtype`, as float32 so that nothing fuses it into the sum."""
    exact = ct.astype(x, ct.float32) * ct.astype(factor, ct.float32)
    return ct.astype(ct.astype(exact, dtype), ct.float32)


def rotate(x, cos, sin, out, group, shape, round_products, layout, width, angles):
    batch = ct.bid(2)
    dtype = out.dtype if round_products else ct.float32
    heads = ct.reshape(group * shape[0] + ct.arange(shape[0], dtype=ct.int32), (shape[0], 1, 1))
    positions = ct.reshape(ct.bid(0) * shape[1] + ct.arange(shape[1], dtype=ct.int32), (1, shape[1], 1))
    column = ct.reshape(ct.arange(shape[2], dtype=ct.int32), (1, 1, shape[2]))
    own, partner, first = sources(column, layout, width)
    turns = column < width
    own, partner = ct.where(turns, own, column), ct.where(turns, partner, column)
    angle = column // 2 if layout == COMPLEX else column % angles
    c = ct.gather(cos, (batch, positions, angle))
    s = ct.gather(sin, (batch, positions, angle))
    kept = ct.gather(x, (batch, heads, positions, own))
    straight = product(kept, c, dtype)
    across = product(ct.gather(x, (batch, heads, positions, partner)), s, dtype)
    turned = ct.where(first, straight - across, straight + across)
    result = ct.where(turns, turned, ct.astype(kept, ct.float32))
    ct.scatter(out, (batch, heads, positions, column), ct.astype(result, out.dtype))


@ct.kernel
def rotary_variant_kernel(
    q, k, cos, sin, q_out, k_out,
    ROUND: Flag, LAYOUT: Int, ROTATED: Int, ANGLES: Int, Q_GROUPS: Int, HEADS: Int, POSITIONS: Int,
    COLUMNS: Int,
):  # fmt: skip
    group = ct.bid(1)
    shape = (HEADS, POSITIONS, COLUMNS)
    if group < Q_GROUPS:
        rotate(q, cos, sin, q_out, group, shape, ROUND, LAYOUT, ROTATED, ANGLES)
    else:
        rotate(k, cos, sin, k_out, group - Q_GROUPS, shape, ROUND, LAYOUT, ROTATED, ANGLES)


@lru_cache(maxsize=4096)
def pick_tiles(heads: int, positions: int, width: int) -> tuple[int, int, int]:
    """HEADS, POSITIONS and COLUMNS of a block, for a number of heads, of positions, and a head's width."""
    columns = covering_power(width)
    per_heads = min(MAX_HEADS, covering_power(heads))
    rows = max(1, BLOCK // columns // per_heads)
    return per_heads, min(rows, covering_power(positions)), columns


def _launch(arrays: tuple[torch.Tensor, ...], layout: int, rotated: int, angles: int, rounded: bool) -> None:
    """Rotates arrays[0] and arrays[1] into arrays[4] and arrays[5], all [batch, heads, positions, width]."""
    q, k, cos, sin = arrays[:4]
    batch, q_heads, positions, width = q.shape
    if cos.shape[0] != batch:
        arrays = (q, k, cos.expand(batch, -1, -1), sin.expand(batch, -1, -1), *arrays[4:])
    tile = pick_tiles(q_heads, positions, width)
    q_groups = -(-q_heads // tile[0])
    k_groups = 0 if k is q else -(-k.shape[1] // tile[0])
    grid = (-(-positions // tile[1]), q_groups + k_groups, batch)
    launch(rotary_variant_kernel, grid, (*arrays, rounded, layout, rotated, angles, q_groups, *tile))


def _pair(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: int,
    rotated: int,
    angles: int,
    rounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out = torch.empty(q.shape, dtype=_result_dtype(q, cos, rounded), device=q.device)
    k_out = torch.empty(k.shape, dtype=_result_dtype(k, cos, rounded), device=k.device)
    _rotate_both((q, k, cos, sin, q_out, k_out), layout, rotated, angles, rounded)
    return q_out, k_out


def _rotate_both(arrays: tuple[torch.Tensor, ...], layout: int, rotated: int, angles: int, rounded: bool) -> None:
    """`_launch`, for what of the two there is, and where there is something to rotate."""
    q, k, cos, sin, q_out, k_out = arrays
    if not rotated:
        q_out.copy_(q)
        k_out.copy_(k)
    elif q_out.numel() and k_out.numel():
        _launch(arrays, layout, rotated, angles, rounded)
    elif q_out.numel():
        _launch((q, q, cos, sin, q_out, q_out), layout, rotated, angles, rounded)
    elif k_out.numel():
        _launch((k, k, cos, sin, k_out, k_out), layout, rotated, angles, rounded)


def _broadcast_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: int,
    rotated: int,
    angles: int,
    rounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pair` with the dimension in cos and sin over which heads broadcast, before or after the positions."""
    if cos.shape[1] == 1 and cos.shape[2] == q.shape[2]:
        return _pair(q, k, cos[:, 0], sin[:, 0], layout, rotated, angles, rounded)
    outs = [torch.empty(x.shape, dtype=_result_dtype(x, cos, rounded), device=x.device) for x in (q, k)]
    heads = (x.transpose(1, 2) for x in (q, k))
    views = (x.transpose(1, 2) for x in outs)
    _rotate_both((*heads, cos[:, :, 0], sin[:, :, 0], *views), layout, rotated, angles, rounded)
    return outs[0], outs[1]


def _result_dtype(x: torch.Tensor, cos: torch.Tensor, rounded: bool) -> torch.dtype:
    if x.dtype == cos.dtype or not rounded:
        return x.dtype
    return torch.promote_types(x.dtype, cos.dtype)


Pair = tuple[torch.Tensor, torch.Tensor]


def rotary_embedding_partial(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotates the first columns of queries and keys by halves, as many as cos has.

    Args:
        q: [batch, heads, positions, head_dim], any strides, float32, float16 or bfloat16.
        k: [batch, key heads, positions, head_dim].
        cos: [batch or 1, positions, rotated], both halves given.
        sin: like `cos`.

    Returns:
        Queries and keys, contiguous, every step rounded to the dtype that `q * cos` has.
    """
    width = cos.shape[-1]
    return _pair(q, k, cos, sin, HALVES, width, width)


def rotary_embedding_half_width(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotates queries and keys by halves that share cos and sin of [batch or 1, positions, head_dim / 2]."""
    width = q.shape[-1]
    return _pair(q, k, cos, sin, HALVES, width, width // 2)


def rotary_embedding_pairs_to_halves(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotates neighbouring pairs by the first half of cos and sin; the results have first members first.

    Args:
        q: [batch, heads, positions, head_dim], any strides, float32, float16 or bfloat16.
        k: [batch, key heads, positions, head_dim].
        cos: [batch or 1, positions, head_dim], of which the first half is read.
        sin: like `cos`.

    Returns:
        Queries and keys, contiguous, every step rounded to the dtype that `q * cos` has.
    """
    width = q.shape[-1]
    return _pair(q, k, cos, sin, PAIRS_TO_HALVES, width, width // 2)


def rotary_embedding_pairs_to_halves_shared(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Rotates neighbouring pairs; the results have first members first.

    Args:
        q: [batch, heads, positions, head_dim] or [batch, positions, heads, head_dim], any strides.
        k: As `q`, of any number of heads.
        cos: [batch or 1, 1, positions, head_dim / 2] or [batch or 1, positions, 1, head_dim / 2].
        sin: like `cos`.

    Returns:
        Queries and keys, contiguous, every step rounded to the dtype that `q * cos` has.
    """
    width = q.shape[-1]
    return _broadcast_pair(q, k, cos, sin, PAIRS_TO_HALVES, width, width // 2)


def rotary_embedding_interleaved_partial(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Rotates the first columns of queries and keys by pairs.

    Args:
        q: [batch, heads, positions, head_dim] or [batch, positions, heads, head_dim], any strides.
        k: As `q`, of any number of heads.
        cos: [batch or 1, 1, positions, rotated] or [batch or 1, positions, 1, rotated].
        sin: like `cos`.

    Returns:
        Queries and keys, contiguous, every step rounded to the dtype that `q * cos` has.
    """
    width = cos.shape[-1]
    return _broadcast_pair(q, k, cos, sin, PAIRS, width, width)


def rotary_embedding_complex(q: torch.Tensor, k: torch.Tensor, phases: torch.Tensor) -> Pair:
    """Multiplies neighbouring pairs of columns, as complex numbers, with `phases` in float32 and rounds once.

    Args:
        q: [batch, heads, positions, head_dim] or [batch, positions, heads, head_dim], any strides.
        k: As `q`, of any number of heads.
        phases: [batch or 1, 1, positions, head_dim / 2] or [batch or 1, positions, 1, head_dim / 2], complex64.
    """
    width = q.shape[-1]
    cos, sin = torch.view_as_real(phases.resolve_conj()).unbind(-1)
    return _broadcast_pair(q, k, cos, sin, COMPLEX, width, width // 2, rounded=False)


def rotary_embedding_interleaved_fp32(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotates queries and keys by pairs in float32 and rounds once; cos and sin are [batch or 1,
    positions, head_dim].
    """
    width = q.shape[-1]
    return _pair(q, k, cos, sin, PAIRS, width, width, rounded=False)


def rotary_embedding_single(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates one tensor of [batch, positions, heads, head_dim] by halves.

    Args:
        x: Any strides, float32, float16 or bfloat16.
        cos: [batch or 1, positions, head_dim], both halves given.
        sin: like `cos`.

    Returns:
        The rotated tensor, contiguous, every step rounded to the dtype that `x * cos` has.
    """
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=_result_dtype(x, cos, True), device=x.device)
    if out.numel():
        view, target = x.transpose(1, 2), out.transpose(1, 2)
        _launch((view, view, cos, sin, target, target), HALVES, width, width, True)
    return out


def rotary_embedding_interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """Rotates queries and keys by pairs; cos and sin are [batch or 1, 1, positions, head_dim]."""
    return rotary_embedding_interleaved_partial(q, k, cos, sin)


def rotary_embedding_interleaved_fp32_shared(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Pair:
    """Rotates by pairs in float32 and rounds once; cos and sin are [batch or 1, 1, positions, head_dim]."""
    width = q.shape[-1]
    return _pair(q, k, cos[:, 0], sin[:, 0], PAIRS, width, width, rounded=False)
