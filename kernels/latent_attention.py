"""Attention over cached latents in cuTile: what a weight expands to keys and values is never expanded.

    author's:  k = [W_k c, k_pe], v = W_v c for every head and token,  y = softmax(scale [q_nope, q_pe] k^T + mask) v
    absorbed:  q = W_k^T q_nope for every head,  z = softmax(scale (q c^T + q_pe k_pe^T) + mask) c,  y = W_v z

    q_nope [B, H, S, D], q_pe [B, H, S, R], latents c [B, 1, T, L], k_pe [B, 1, T, R], weight [H (D + V), L],
    mask [1 or B, 1, 1 or S, T], y [B, S, H, V]

The absorbed form reads L + R numbers a token, once for all heads of a block; the author's writes and reads
H (D + V + R) besides. It multiplies more, 2 L + R for each head, query and token instead of D + R + V, which many
queries would pay for and few do not. So prompts take the author's order, through the kernels of linear.py, concat.py
and gqa_attention.py.

Four launches: `latent_product_kernel` for q, one matrix a head; `latent_decode_kernel`, whose blocks hold the queries
of several heads ("rows") in one tile and share the tokens of a sequence; `latent_combine_kernel`, which adds up their
float32 results in a fixed order; `latent_product_kernel` again for y. q is rounded to the dtype of the model, where the
author rounds keys. z is not, and is multiplied in two parts of that dtype: y is a sum of hundreds of terms of z, and
where these cancel, the author's value has been rounded after its sum. Masks, and the span of tokens that is read, are
those of gqa_attention.py.

In decode a tile of latents is read once, as keys and as values, and is the left operand of both products: scores are
[tokens, rows], attended latents [L, rows]. So 16 heads take HGMMA, which wants 64 rows on its left; as right operands
(scores [rows, tokens]) the same tiles took HMMA on sm_90 and spilled 138 registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, processor_count, with_hints

from .concat import concat_last, concat_last_shared
from .gqa_attention import (
    ADDITIVE,
    BOOLEAN,
    DECODE_QUERIES,
    INFINITY,
    LOG2_E,
    MAX_SHARES,
    MIN_ROWS,
    SPAN_COLUMNS,
    SPAN_ELEMENTS,
    ZERO,
    Flag,
    Int,
    _compact,
    _unit_stride,
    gqa_attention_masked,
    masked,
    numbers,
    reach,
    read_mask,
    softmax_step,
)
from .linear import linear

#: Widest latents whose attended values a block holds in registers.
WIDEST = 512
#: Tile of the products: rows, columns of the result, and steps along the sum.
PRODUCT_ROWS, COLUMNS, DEPTH = 64, 64, 128
#: Columns of a block of the combining kernel, which holds all shares of them in registers.
COMBINED = 128


@dataclass(frozen=True)
class Tiling:
    """How the decode kernel is cut.

    Attributes:
        rows: Most heads times queries of a block, padded.
        keys: Tokens of one step.
        occupancy: Blocks that should fit on one multiprocessor.
        worker_warps: Warps that compute, 0 for the compiler's choice.
        shares: Blocks that share the tokens of a sequence, 0 for as many as fill the GPU.
    """

    rows: int
    keys: int
    occupancy: int
    worker_warps: int = 0
    shares: int = 0


#: With as many shares as fill the GPU at most 1.08 times the fastest of benchmarks/bench_latent_attention.py, for the
#: heads of DeepSeek-V2-Lite and V3 after 2048 and 8192 tokens, one sequence and several, on an H200 (report
#: benchmarks/2026-12-01_h200_second); 64 rows and 8 warps, 1.13 to 1.19 times.
TILING = Tiling(32, 64, 1)


@ct.kernel
def latent_product_kernel(x, weight, y, BATCH: Int, QUERIES: Int, COLUMNS: Int, DEPTH: Int, OUT_FIRST: Flag):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    block, column, head = ct.bid(0), ct.bid(1), ct.bid(2)
    rows = BATCH * QUERIES
    sums = ct.zeros((rows, COLUMNS), ct.float32)
    for step in range(ct.cdiv(x.shape[3], DEPTH)):
        tile = ct.load(x, (block, head, 0, step), (BATCH, 1, QUERIES, DEPTH), padding_mode=ZERO)
        shape = (1, DEPTH, COLUMNS)
        if OUT_FIRST:
            matrix = ct.load(weight, (head, step, column), shape, order=(0, 2, 1), padding_mode=ZERO)
        else:
            matrix = ct.load(weight, (head, step, column), shape, padding_mode=ZERO)
        sums = multiplied(ct.reshape(tile, (rows, DEPTH)), ct.reshape(matrix, (DEPTH, COLUMNS)), sums)
    sums = ct.reshape(ct.astype(sums, y.dtype), (BATCH, 1, QUERIES, COLUMNS))
    ct.store(y, (block, head, 0, column), sums)


def multiplied(left, right, sums):
    """`sums` and the product of two tiles; a left one in float32 goes in as what it rounds to, and the rest of it."""
    rounded = ct.astype(left, right.dtype)
    sums = ct.mma(rounded, right, sums)
    if left.dtype != right.dtype:
        sums = ct.mma(ct.astype(left - ct.astype(rounded, ct.float32), right.dtype), right, sums)
    return sums


def query_tile(q, batch, block, heads, queries, width):
    """The queries of some heads as columns of one tile, a head's beside each other."""
    tile = ct.load(q, (batch, block, 0, 0), (1, heads, queries, width), padding_mode=ZERO)
    return ct.transpose(ct.reshape(tile, (heads * queries, width)))


@ct.kernel
def latent_decode_kernel(
    q, q_pe, latents, k_pe, mask, z, parts, tops, totals, factor,
    HEADS: Int, QUERIES: Int, KEYS: Int, WIDTH: Int, TURNED: Int,
    MASK: Int, MASK_ROWS: Int, COLUMNS: Int, DIRECT: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    blocks = ct.cdiv(q.shape[1], HEADS)
    batch, block = ct.bid(0) // blocks, ct.bid(0) % blocks
    rows = HEADS * QUERIES
    keys = latents.shape[2]
    query = query_tile(q, batch, block, HEADS, QUERIES, WIDTH)
    turned = query_tile(q_pe, batch, block, HEADS, QUERIES, TURNED)
    from_end, from_start = reach(mask, batch, 0, 0, MASK_ROWS, COLUMNS, MASK)
    first, last = (keys - ct.max(from_end)) // KEYS, ct.cdiv(ct.max(from_start), KEYS)
    share = ct.cdiv(ct.maximum(last - first, 0), ct.num_blocks(1))
    first = first + ct.bid(1) * share
    last = ct.minimum(first + share, last)
    top = ct.full((1, rows), -INFINITY, ct.float32)
    total = ct.zeros((1, rows), ct.float32)
    out = ct.zeros((WIDTH, rows), ct.float32)
    for step in range(first, last):
        place = (batch, 0, step, 0)
        values = ct.reshape(ct.load(latents, place, (1, 1, KEYS, WIDTH), padding_mode=ZERO), (KEYS, WIDTH))
        key = ct.reshape(ct.load(k_pe, place, (1, 1, KEYS, TURNED), padding_mode=ZERO), (KEYS, TURNED))
        scores = ct.mma(values, query, ct.zeros((KEYS, rows), ct.float32))
        scores = ct.mma(key, turned, scores)
        tile = ct.transpose(read_mask(mask, batch, 0, 0, step, (MASK_ROWS, KEYS), MASK))
        if MASK_ROWS > 1:  # the mask has a row for each query, which all heads share
            tile = ct.broadcast_to(ct.reshape(tile, (KEYS, 1, QUERIES)), (KEYS, HEADS, QUERIES))
            tile = ct.reshape(tile, (KEYS, rows))
        scores, rest = masked(scores, factor, tile, MASK)
        weights, rescale, top, total = softmax_step(scores, rest, top, total, 0)
        out = ct.mma(ct.transpose(values), ct.astype(weights, values.dtype), out * rescale)
    out = ct.transpose(out)
    if DIRECT:
        out = out * (1.0 / ct.reshape(ct.where(total > 0.0, total, 1.0), (rows, 1)))
        ct.store(z, (batch, block, 0, 0), ct.astype(ct.reshape(out, (1, HEADS, QUERIES, WIDTH)), z.dtype))
    else:
        ct.store(parts, (ct.bid(0), ct.bid(1), 0, 0), ct.reshape(out, (1, 1, rows, WIDTH)))
        ct.store(tops, (ct.bid(0), ct.bid(1), 0), ct.reshape(top, (1, 1, rows)))
        ct.store(totals, (ct.bid(0), ct.bid(1), 0), ct.reshape(total, (1, 1, rows)))


@ct.kernel
def latent_combine_kernel(parts, tops, totals, z, HEADS: Int, QUERIES: Int, SHARES: Int, COLUMNS: Int):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column, batch = ct.bid(1), ct.bid(2)
    head, position = ct.bid(0) // z.shape[2], ct.bid(0) % z.shape[2]
    pair = batch * ct.cdiv(z.shape[1], HEADS) + head // HEADS
    row = head % HEADS * QUERIES + position
    top = ct.load(tops, (pair, 0, row), (1, SHARES, 1), padding_mode=ZERO)
    top = ct.where(ct.reshape(numbers(0, SHARES, 1), (1, SHARES, 1)) < tops.shape[1], top, -INFINITY)
    total = ct.load(totals, (pair, 0, row), (1, SHARES, 1), padding_mode=ZERO)
    part = ct.load(parts, (pair, 0, row, column), (1, SHARES, 1, COLUMNS), padding_mode=ZERO)
    highest = ct.max(top)
    weights = ct.exp2(top - ct.where(highest > -INFINITY, highest, 0.0))
    whole = ct.sum(total * weights)
    out = ct.sum(ct.reshape(part, (SHARES, COLUMNS)) * ct.reshape(weights, (SHARES, 1)), axis=0)
    out = ct.reshape(out / ct.where(whole > 0.0, whole, 1.0), (1, 1, 1, COLUMNS))
    ct.store(z, (batch, head, position, column), ct.astype(out, z.dtype))


def latent_attention_masked(
    q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, k_pe: torch.Tensor, kv_weight: torch.Tensor,
    mask: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention whose keys and values are latents times a weight, beside a rotated key that all heads share.

    Args:
        q_nope: The part of the queries that is not rotated, [B, H, S, D], any strides, as for all inputs.
        q_pe: The rotated part, [B, H, S, R].
        latents: [B, 1, T, L].
        k_pe: The rotated key, [B, 1, T, R].
        kv_weight: [H (D + V), L]; for each head the D rows of its key come first.
        mask: Boolean (True = attend) or added, broadcasts to [B, 1, S, T].
        scale: Factor on the products of queries and keys.

    Returns:
        Contiguous [B, S, H, V] in the dtype of the queries.
    """
    wanted = absorbed_attention if is_absorbed(q_nope, q_pe, latents) else expanded_attention
    return wanted(q_nope, q_pe, latents, k_pe, kv_weight, mask, scale)


def is_absorbed(q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor) -> bool:
    """Whether the absorbed form is taken: few queries, 2-byte elements, and latents that a tile holds.

    In float32 `ct.mma` unrolls, and the attended latents of 16 rows spill.
    """
    tokens, width = latents.shape[2:]
    is_empty = not min(tokens, width, q_nope.shape[3], q_pe.shape[3])
    return q_nope.shape[2] <= DECODE_QUERIES and q_nope.itemsize == 2 and width <= WIDEST and not is_empty


def absorbed_attention(
    q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, k_pe: torch.Tensor, kv_weight: torch.Tensor,
    mask: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """`latent_attention_masked` with the weight multiplied into queries and results; D, R, L and T are not 0."""
    batch, heads, length, width = q_nope.shape
    matrices = kv_weight.contiguous().view(heads, -1, latents.shape[3])
    y = torch.empty(batch, length, heads, matrices.shape[1] - width, dtype=q_nope.dtype, device=q_nope.device)
    if scale <= 0:  # the kernel takes the maximum before it scales
        sign = -1 if scale else 0
        q_nope, q_pe, scale = q_nope * sign, q_pe * sign, -scale or 1.0
    if y.numel():
        q_pe, latents, k_pe = _unit_stride(q_pe), _unit_stride(latents), _unit_stride(k_pe)
        mask = _compact(mask, latents.shape[2])
        run_absorbed(q_nope, q_pe, latents, k_pe, matrices, mask, y, scale, TILING)
    return y


def expanded_attention(
    q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, k_pe: torch.Tensor, kv_weight: torch.Tensor,
    mask: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """`latent_attention_masked` in its author's order: keys and values of every head are written first."""
    batch, heads, _, width = q_nope.shape
    expanded = linear(latents[:, 0], kv_weight).view(batch, latents.shape[2], heads, -1).transpose(1, 2)
    keys = concat_last_shared(expanded[..., :width], k_pe)
    return gqa_attention_masked(concat_last(q_nope, q_pe), keys, expanded[..., width:], mask, scale)


def run_absorbed(
    q_nope: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, k_pe: torch.Tensor, matrices: torch.Tensor,
    mask: torch.Tensor, y: torch.Tensor, scale: float, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill y [B, S, H, V] with the absorbed form; matrices are [H, D + V, L], a mask is [1 or B, 1, 1 or S, T]."""
    width = q_nope.shape[3]
    q = q_nope.new_empty(*q_nope.shape[:3], latents.shape[3])
    z = torch.empty_like(q, dtype=torch.float32)
    run_product(q_nope, matrices[:, :width], q, out_first=False)
    run_decode(q, q_pe, latents, k_pe, mask, z, scale, tiling)
    run_product(z, matrices[:, width:], y.transpose(1, 2), out_first=True)


def run_product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, out_first: bool) -> None:
    """Fill y [B, H, S, N] with x [B, H, S, K] times the matrix of each head: [H, N, K] if out_first, else [H, K, N]."""
    batch, heads, length, _ = x.shape
    queries = covering_power(length)
    sequences = max(min(covering_power(batch), PRODUCT_ROWS // queries), MIN_ROWS // queries)
    grid = (-(-batch // sequences), -(-y.shape[3] // COLUMNS), heads)
    launch(latent_product_kernel, grid, (_unit_stride(x), weight, y, sequences, queries, COLUMNS, DEPTH, out_first))


def run_decode(
    q: torch.Tensor, q_pe: torch.Tensor, latents: torch.Tensor, k_pe: torch.Tensor, mask: torch.Tensor,
    z: torch.Tensor, scale: float, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill z [B, H, S, L] with the latents that q [B, H, S, L] attends to; a mask is [1 or B, 1, 1 or S, T]."""
    batch, heads, length, width = q.shape
    queries = covering_power(length)
    group = max(min(covering_power(heads), tiling.rows // queries), MIN_ROWS // queries)
    pairs = batch * -(-heads // group)
    rows = group * queries
    kind = BOOLEAN if mask.dtype == torch.uint8 else ADDITIVE
    mask_rows = queries if mask.shape[2] > 1 else 1
    wanted = tiling.shares or tiling.occupancy * processor_count(q.device) // pairs
    shares = max(1, min(wanted, -(-latents.shape[2] // tiling.keys), MAX_SHARES))
    parts = tops = totals = q  # a kernel takes no None; it does not write these then
    if shares > 1:
        parts = torch.empty((pairs, shares, rows, width), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty((2, pairs, shares, rows), dtype=torch.float32, device=q.device)
    launch(
        with_hints(latent_decode_kernel, tiling.occupancy, tiling.worker_warps),
        (pairs, shares),
        (
            q, q_pe, latents, k_pe, mask, z, parts, tops, totals, scale * LOG2_E,
            group, queries, tiling.keys, covering_power(width), covering_power(k_pe.shape[3]),
            kind, mask_rows, max(SPAN_COLUMNS, SPAN_ELEMENTS // mask_rows), shares == 1,
        ),
    )  # fmt: skip
    if shares > 1:
        columns = min(COMBINED, covering_power(width))
        grid = (heads * length, -(-width // columns), batch)
        launch(latent_combine_kernel, grid, (parts, tops, totals, z, group, queries, covering_power(shares), columns))
