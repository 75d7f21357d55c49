"""The update of a full cache of a sliding window by one token, in one cuTile launch.

    out[:, :, t] = cache[:, :, t + 1],  out[:, :, last] = new          of keys and of values

`cache_roll_write_` moves within the cache: what a place gets lies in the next one, so nobody may write a place before
it has been read. A block therefore owns a strip: all tokens of a head, and so few columns that the strips of keys and
values fill the GPU. No other block reads or writes there. It takes its tokens in ascending tiles, and reads a tile in
whole before it writes it, one token lower, where no later tile reads. The last tile ends with the strip, wherever the
one before it ends, and both are read before either is written: so no tile sticks out, and every access is a wide one.
Tiles are gathered: the machine code of `ct.load` without TMA takes an element at a time here.

`cache_roll_write` moves to new tensors, in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, processor_count

#: Bytes of a tile: two are in registers at the end, in 128 threads 128 registers each. Of 8, 16 and 32 KiB these were
#: the fastest at every shape, by 1.3 to 1.8 times (benchmarks/2026-11-30_h200_third).
TILE_BYTES = 32 * 1024
#: Bytes of one token in a strip, widest first; memory is read in sectors of 32.
STRIP_BYTES = (64, 32)
#: Share of the GPU's time that is to be used: 192 equal blocks on 132 multiprocessors leave a quarter of it.
BALANCE = 0.9

Int = ct.Constant[int]
Flag = ct.Constant[bool]


@dataclass(frozen=True)
class Tile:
    """Tokens and columns of one tile, and whether strips of so many columns divide every row."""

    tokens: int
    columns: int
    whole: bool


def places(head, batch, token, columns, TOKENS):
    tokens = ct.reshape(token + ct.arange(TOKENS, dtype=ct.int32), (TOKENS, 1))
    return batch, head, tokens, columns


def read(array, head, batch, token, columns, TOKENS, WHOLE):
    at = places(head, batch, token, columns, TOKENS)
    if WHOLE:
        return ct.gather(array, at, check_bounds=False)
    return ct.gather(array, at, mask=columns < array.shape[3], check_bounds=False)


def write(array, head, batch, token, columns, tile, TOKENS, WHOLE):
    at = places(head, batch, token, columns, TOKENS)
    if WHOLE:
        ct.scatter(array, at, tile, check_bounds=False)
    else:
        ct.scatter(array, at, tile, mask=columns < array.shape[3], check_bounds=False)


def move_up(cache, out, new, strip, TOKENS, COLUMNS, WHOLE):
    """Move a strip up by one token and put the new one into the last place."""
    head, batch = ct.bid(1), ct.bid(2)
    columns = ct.reshape(strip * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    moved = cache.shape[2] - 1
    last = read(new, head, batch, 0, columns, 1, WHOLE)
    if moved > 0:
        before = max(ct.cdiv(moved, TOKENS) - 2, 0)
        for i in range(before):
            tile = read(cache, head, batch, i * TOKENS + 1, columns, TOKENS, WHOLE)
            write(out, head, batch, i * TOKENS, columns, tile, TOKENS, WHOLE)
        first, second = before * TOKENS, moved - TOKENS
        tile = read(cache, head, batch, first + 1, columns, TOKENS, WHOLE)
        other = read(cache, head, batch, second + 1, columns, TOKENS, WHOLE)
        write(out, head, batch, first, columns, tile, TOKENS, WHOLE)
        write(out, head, batch, second, columns, other, TOKENS, WHOLE)
    write(out, head, batch, moved, columns, last, 1, WHOLE)


@ct.kernel
def cache_roll_write_kernel(
    k, v, keys, values, keys_out, values_out, STRIPS: Int, TOKENS: Int, COLUMNS: Int, WHOLE: Flag
):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    strip = ct.bid(0)
    if strip < STRIPS:
        move_up(keys, keys_out, k, strip, TOKENS, COLUMNS, WHOLE)
    else:
        move_up(values, values_out, v, strip - STRIPS, TOKENS, COLUMNS, WHOLE)


@ct.kernel
def cache_roll_write_in_place_kernel(k, v, keys, values, STRIPS: Int, TOKENS: Int, COLUMNS: Int, WHOLE: Flag):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    strip = ct.bid(0)
    if strip < STRIPS:
        move_up(keys, keys, k, strip, TOKENS, COLUMNS, WHOLE)
    else:
        move_up(values, values, v, strip - STRIPS, TOKENS, COLUMNS, WHOLE)


@lru_cache
def choose_tile(held: int, widths: tuple[int, int], itemsize: int, rows: int, processors: int) -> Tile:
    """The widest strips that use the GPU evenly, or all have a multiprocessor of their own; else the narrowest.

    Args:
        held: Tokens of the cache.
        widths: Of keys and of values.
        itemsize: Bytes of an element.
        rows: Heads of all sequences.
        processors: Multiprocessors of the GPU.
    """
    for columns in (size // itemsize for size in STRIP_BYTES):
        blocks = rows * sum(-(-width // columns) for width in widths)
        rounds = blocks / processors
        if rounds <= 1 or rounds / math.ceil(rounds) >= BALANCE:
            break
    columns = min(columns, covering_power(max(*widths, 1)))
    while columns * itemsize > 16 and any(width % columns for width in widths):
        columns //= 2
    tokens = min(TILE_BYTES // (columns * itemsize), covering_power(max(held, 2)) // 2)
    while tokens > max(held - 1, 1):
        tokens //= 2
    return Tile(tokens, columns, not any(width % columns for width in widths))


def run_cache_roll_write(kernel: ct.kernel, arrays: tuple[torch.Tensor, ...], tile: Tile) -> None:
    """One of the kernels in tiles of a given shape.

    Args:
        kernel: Which.
        arrays: What it takes: new keys and values, the cache's, and where they go if that is elsewhere.
        tile: Its tokens are a power of two and fewer than the cache's, but for a cache of one token.
    """
    keys, values = arrays[2:4]
    batch, heads, held, _ = keys.shape
    strips, value_strips = (-(-x.shape[3] // tile.columns) for x in (keys, values))
    grid = (strips + value_strips, heads, batch)
    if all(grid) and held:
        launch(kernel, grid, (*arrays, strips, tile.tokens, tile.columns, tile.whole))


def _tile_of(keys: torch.Tensor, values: torch.Tensor) -> Tile:
    batch, heads, held, width = keys.shape
    itemsize, processors = max(keys.itemsize, values.itemsize), processor_count(keys.device)
    return choose_tile(held, (width, values.shape[3]), itemsize, batch * heads, processors)


def cache_roll_write_(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`cache_roll_write` within the cache itself."""
    run_cache_roll_write(cache_roll_write_in_place_kernel, (k, v, keys, values), _tile_of(keys, values))


def cache_roll_write(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drops the oldest token of a cache and appends a new one.

    Args:
        k: [batch, key heads, 1, head_dim], any strides, float32, float16 or bfloat16.
        v: [batch, key heads, 1, value_dim].
        keys: [batch, key heads, tokens, head_dim], the cache's, oldest first; at least one token.
        values: [batch, key heads, tokens, value_dim].

    Returns:
        The new keys and the new values, contiguous.
    """
    out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    values_out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    arrays = k, v, keys, values, out, values_out
    run_cache_roll_write(cache_roll_write_kernel, arrays, _tile_of(keys, values))
    return out, values_out
