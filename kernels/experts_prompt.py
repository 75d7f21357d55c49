"""Routed experts with many rows each in cuTile, by products whose tiles are as large as those of a linear:

    y[t] = sum over k of w[t, k] * (down[e] h + down_bias[e]), h the gate of gate_up[e] x[t] + gate_up_bias[e]

Rows are sorted by expert, and each expert's begin at a multiple of ROWS: so a tile of rows belongs to one expert and
is loaded and stored whole, by bulk copies. What is left of an expert's last tile is zeros, half a tile on average.

1. `experts_count_kernel` and `experts_place_kernel` find the row of each pair of a token and an expert, which pair
   each row is, and whose each tile of rows is. Nothing of that is read by the CPU, which launches for as many rows
   as there may be; tiles that nobody has are not computed.
2. `experts_rows_padded_kernel` copies the tokens to their rows.
3. `experts_product_kernel`, twice: persistent blocks walk over the tiles, as those of linear.py do for many rows. The
   first opens the gate as it stores, so that a thread has to have both columns that belong together. Where gate and
   up lie apart, a tile of the matrix is as many rows of one as of the other, side by side. Where they take turns, two
   neighbours are the halves of 32 bits, once they are rounded; to take them apart by sums over an axis of two spilled
   registers.
4. `experts_combine_kernel` of experts_parts.py sums the rows of each token.

Tilings are the fastest of those that `benchmarks/bench_experts.py --sweep` tries, on an H200 for the experts of three
models and 512, 2048 and 16384 tokens (report benchmarks/2026-12-01_h200_second).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, with_hints

from .activation import LOG2_E
from .experts_parts import BLOCK, MAX_COLUMNS, combine, ids_at
from .gated_activation import gated
from .grouped_linear import FEW_ROWS, weight_tile
from .linear import ZERO, Flag, Int, grouped, resident_blocks

#: Pairs that one step of the sort looks at.
SORT_WIDTH = 4096
#: Rows an expert, on average, up to which tiles are short.
SHORT_ROWS = 96

# What a product does when it stores: the parameter KIND.
NOTHING = 0
TURNS = 1  # the clamped gate, of gate and up by turns
APART = 2  # act(gate) * up, of the rows of gate and those of up: APART + SILU or GELU_TANH of activation.py


@dataclass(frozen=True)
class Tiling:
    """How the products are cut: rows of one expert, columns of its matrix, steps along the sum, and warps.

    Attributes:
        rows: Rows of a tile.
        columns: Columns of the product; of gate and up together where the gate is opened.
        depth: Steps along the sum.
        occupancy: Blocks that fit on one multiprocessor.
        worker_warps: Warps that compute.
        latency: Prefetch depth.
    """

    rows: int
    columns: int
    depth: int
    occupancy: int
    worker_warps: int
    latency: int


@dataclass(frozen=True)
class Places:
    """Where the pairs of a call stand.

    Attributes:
        order: [rows]: the pair of each row, -1 in what is left of a tile; rows beyond the tiles hold anything.
        inverse: [pairs]: the row of each pair, as many as there are rows for one without an expert.
        tiles: How many tiles of rows there are, then the expert of each.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    tiles: torch.Tensor


@ct.kernel
def experts_count_kernel(index, counts, WIDTH: Int):
    expert = ct.bid(0)
    own = ct.zeros((WIDTH,), ct.int32)
    for step in range(ct.cdiv(index.shape[0], WIDTH)):
        ids = ids_at(index, step * WIDTH + ct.arange(WIDTH, dtype=ct.int32))
        own = own + ct.where(ids == expert, 1, 0)
    ct.scatter(counts, expert, ct.sum(own))


@ct.kernel
def experts_place_kernel(index, counts, order, inverse, tiles, EXPERTS: Int, ROWS: Int, WIDTH: Int):
    """Block e places the pairs of expert e; the last one those that have none."""
    expert, count = ct.bid(0), counts.shape[0]
    each = ct.arange(EXPERTS, dtype=ct.int32)
    needed = (ct.gather(counts, each, padding_value=0) + ROWS - 1) // ROWS
    first = ct.sum(ct.where(each < expert, needed, 0))
    own = ct.sum(ct.where(each == expert, needed, 0))
    ct.scatter(tiles, ct.where(expert == count, 0, tiles.shape[0]), first)  # other blocks' are outside and dropped
    lane = ct.arange(WIDTH, dtype=ct.int32)
    for step in range(ct.cdiv(own, WIDTH)):
        tile = step * WIDTH + lane
        ct.scatter(tiles, ct.where(tile < own, 1 + first + tile, tiles.shape[0]), ct.full((WIDTH,), expert, ct.int32))
    row = first * ROWS
    for step in range(ct.cdiv(index.shape[0], WIDTH)):
        pair = step * WIDTH + lane
        ids = ids_at(index, pair)
        chosen = (ids == expert) & (expert < count)
        after = ct.cumsum(ct.where(chosen, 1, 0))
        place = ct.where(chosen, row + after - 1, order.shape[0])
        ct.scatter(order, place, pair)
        nobody = ((ids < 0) | (ids >= count)) & (expert == count)
        ct.scatter(inverse, ct.where(chosen | nobody, pair, index.shape[0]), place)
        row = row + ct.sum(ct.where(chosen, 1, 0))
    rest = row + ct.arange(ROWS, dtype=ct.int32)
    ct.scatter(order, ct.where(rest < (first + own) * ROWS, rest, order.shape[0]), ct.full((ROWS,), -1, ct.int32))


@ct.kernel
def experts_rows_padded_kernel(x, order, tiles, rows, PER_TOKEN: Int, TILE: Int, ROWS: Int, COLUMNS: Int):
    row = ct.bid(0) * ROWS + ct.arange(ROWS, dtype=ct.int32)
    row = ct.where(row < ct.gather(tiles, 0) * TILE, row, rows.shape[0])
    pair = ct.gather(order, row, padding_value=-1)
    token = ct.reshape(ct.where(pair < 0, x.shape[0], pair // PER_TOKEN), (ROWS, 1))
    column = ct.reshape(ct.bid(1) * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    ct.scatter(rows, (ct.reshape(row, (ROWS, 1)), column), ct.gather(x, (token, column), padding_value=0))


@ct.kernel
def experts_product_kernel(
    x, weight, bias, tiles, y, alpha, limit,
    KIND: Int, BIAS: Flag, OUT_FIRST: Flag, ROWS: Int, COLUMNS: Int, DEPTH: Int, LATENCY: Int,
):  # fmt: skip
    used = ct.gather(tiles, 0)
    width = COLUMNS if KIND == NOTHING else COLUMNS // 2
    columns = ct.cdiv(y.shape[1], width)
    for number in range(ct.bid(0), used * columns, ct.num_blocks(0)):
        tile, column = grouped(number, used, columns, ROWS)
        expert = ct.gather(tiles, 1 + tile)
        sums = ct.zeros((ROWS, COLUMNS), ct.float32)
        for k in range(ct.cdiv(x.shape[1], DEPTH)):
            left = ct.load(x, (tile, k), (ROWS, DEPTH), padding_mode=ZERO, latency=LATENCY)
            shape = (DEPTH, COLUMNS)
            sums = ct.mma(left, matrix_tile(weight, expert, k, column, shape, KIND, OUT_FIRST, LATENCY), sums)
        if BIAS:
            sums = sums + ct.astype(ct.load(bias, (expert, column), (1, COLUMNS), padding_mode=ZERO), ct.float32)
        ct.store(y, (tile, column), opened(ct.astype(sums, y.dtype), alpha, limit, KIND))


def matrix_tile(weight, expert, k, column, shape, kind, out_first, latency):
    """A tile [in, out] of one expert's matrix, [out, in] or [in, out]; of gate and up, [2, out, in], half of each."""
    if kind < APART:
        return weight_tile(weight, expert, k, column, shape, out_first, latency)
    place, shape4 = (expert, k, 0, column), (1, shape[0], 2, shape[1] // 2)
    return ct.reshape(ct.load(weight, place, shape4, order=(0, 3, 1, 2), padding_mode=ZERO, latency=latency), shape)


def opened(both, alpha, limit, kind):
    """What a tile of a product, rounded already, is stored as."""
    rows, columns = both.shape
    if kind == NOTHING:
        return both
    if kind == TURNS:
        pairs = ct.reshape(ct.unpack_from_bytes(ct.pack_to_bytes(both), ct.int32), (rows, columns // 2))
        gate = ct.bitcast(ct.astype(pairs, ct.int16), both.dtype)
        up = ct.bitcast(ct.astype(pairs >> 16, ct.int16), both.dtype)
        gate, up = ct.astype(gate, ct.float32), ct.astype(up, ct.float32)
        return ct.astype(clamped_gate(gate, up, alpha, limit), both.dtype)
    gate = ct.extract(both, (0, 0), (rows, columns // 2))
    up = ct.extract(both, (0, 1), (rows, columns // 2))
    return gated(gate, up, kind - APART, both.dtype == ct.float32)


def clamped_gate(gate, up, alpha, limit):
    """(clamp(up) + 1) * gate * sigmoid(alpha * gate) in float32; both are at most `limit`, and up at least -`limit`."""
    gate = ct.minimum(gate, limit, propagate_nan=True)
    up = ct.maximum(ct.minimum(up, limit, propagate_nan=True), -limit, propagate_nan=True)
    return (up + 1.0) * (gate / (1.0 + ct.exp2(gate * (-alpha * LOG2_E))))


def has_many_rows(pairs: int, input: torch.Tensor, experts: int) -> bool:
    """Whether a call of so many pairs of a token and an expert is one for this file; `input` gives the dtype."""
    return input.itemsize == 2 and pairs > FEW_ROWS * experts > 0 and input.shape[1] > 0


@cache
def pick_tiling(pairs: int, experts: int, has_bulk_copies: bool = True) -> Tiling:
    """The tiling for so many pairs of a token and an expert, in a dtype of 2 bytes.

    Without bulk copies (before sm_90), where nothing was measured, they are the largest whose registers do not spill.
    """
    is_short = pairs <= SHORT_ROWS * experts
    if not has_bulk_copies:
        return Tiling(64, 64, 64, 2, 4, 3) if is_short else Tiling(128, 128, 32, 1, 4, 4)
    return Tiling(64, 128, 64, 2, 4, 3) if is_short else Tiling(128, 256, 64, 1, 8, 6)


@cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether a GPU loads tiles by itself; off the GPU True, so that kernels are laid out as on an H200."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def placed(top_k_index: torch.Tensor, count: int, tile: int) -> Places:
    """The rows of all pairs.

    Args:
        top_k_index: [tokens, experts of a token], integers; a pair has no row unless its expert is one of `count`.
        count: Experts, at least one.
        tile: Rows of a tile.
    """
    pairs = top_k_index.numel()
    tiles = pairs // tile + min(count, pairs)  # the most that there may be
    scratch = torch.empty(count + tiles * tile + pairs + 1 + tiles, dtype=torch.int32, device=top_k_index.device)
    counts, order, inverse, owners = scratch.split([count, tiles * tile, pairs, 1 + tiles])
    index, width = top_k_index.reshape(-1), min(SORT_WIDTH, covering_power(pairs))
    launch(experts_count_kernel, (count,), (index, counts, width))
    cut = (covering_power(count), tile, width)
    launch(experts_place_kernel, (count + 1,), (index, counts, order, inverse, owners, *cut))
    return Places(order, inverse, owners)


class Prompt:
    """The rows of a call, for its products and the sum at their end.

    Args:
        hidden_states: [tokens, hidden], of 2 bytes.
        top_k_index: [tokens, experts of a token], at least one.
        count: Experts, at least one.
    """

    def __init__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, count: int) -> None:
        hidden = hidden_states.shape[1]
        self.tiling = pick_tiling(top_k_index.numel(), count, has_bulk_copies(hidden_states.device))
        self.places = placed(top_k_index, count, self.tiling.rows)
        self.rows = hidden_states.new_empty(self.places.order.shape[0], hidden)
        columns = min(MAX_COLUMNS, covering_power(hidden))
        height = max(1, min(BLOCK // columns, self.tiling.rows))
        grid = (self.rows.shape[0] // height, -(-hidden // columns))
        cut = (top_k_index.shape[1], self.tiling.rows, height, columns)
        launch(experts_rows_padded_kernel, grid, (hidden_states, self.places.order, self.places.tiles, self.rows, *cut))

    def product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, kind: int = NOTHING,
        out_first: bool = True, alpha: float = 0.0, limit: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        """Every row times the matrix of its expert.

        Args:
            rows: As many as `self.rows`.
            weight: [experts, out, in], or [experts, in, out] unless `out_first`; APART [experts, 2, out, in].
            bias: [experts, out], or None.
            kind: NOTHING, or the gate that is opened.
            out_first: Which of the two.
            alpha: Steepness of a clamped gate.
            limit: What it is clamped to.
        """
        tiling, tiles = self.tiling, self.places.tiles
        width = weight.shape[-2 if out_first else -1] // (2 if kind == TURNS else 1)
        y = rows.new_empty(rows.shape[0], width)
        columns = -(-width // (tiling.columns if kind == NOTHING else tiling.columns // 2))
        grid = (resident_blocks((tiles.shape[0] - 1) * columns, tiling.occupancy, rows.device),)
        extra = weight if bias is None else bias  # a kernel takes no None; it does not read this
        cut = (tiling.rows, tiling.columns, tiling.depth, tiling.latency)
        args = (rows, weight, extra, tiles, y, alpha, limit, kind, bias is not None, out_first, *cut)
        launch(with_hints(experts_product_kernel, tiling.occupancy, tiling.worker_warps), grid, args)
        return y

    def sum(self, rows: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's rows, [tokens, out]."""
        return combine(rows, top_k_weights, self.places.inverse)
