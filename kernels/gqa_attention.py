"""Grouped-query attention in cuTile: y = softmax(scale q k^T + mask) v, Hq / Hk query heads to a key head.

    q [B, Hq, S, D], k [B, Hk, T, D], v [B, Hk, T, Dv], y [B, S, Hq, Dv]

Softmax is computed online: a block keeps, per query, the maximum so far, the sum and the weighted values
(float32), and rescales them when a tile of keys raises the maximum. Exponentials are powers of two;
`factor` is scale * log2(e).

`attention_prefill_kernel` is for many queries. A block owns QUERIES of one head and walks over tiles of
KEYS keys; tiles that every query sees come first and are not masked. With CAUSAL (top-left aligned, as in
torch) later queries have more keys, so the blocks with the longest walk start first.
`attention_decode_kernel` is for a few queries against a long cache: the query heads of a key head are rows
of one tile, so that keys and values are read once, and blocks share the keys among them;
`attention_combine_kernel` adds up their float32 results, in a fixed order.

Masks are boolean (True = attend) or added to the scaled products. Most of a mask is often empty: above the
diagonal, outside a window, beyond the filled part of a static cache. Keys outside the span that the queries
of a block see are not read. In decode each block finds that span itself, before it takes its share; in prefill
`attention_span_kernel` writes it. A query that sees no key gives 0, as in F.scaled_dot_product_attention.

In decode no step looks at its own tile of the mask to leave the product out, which would spare the search: with such
an `if` in its loop the kernel never ended on an H200 for masks that do not arrive by bulk copies (rows of no multiple
of 16 bytes, CTK 13.4.92).

Tiles have the next power of two above D (80 and 96 run as 128); the part beyond D is zeros, which add
nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import cuda.tile as ct
import torch

from tilegym_fx import tuning
from tilegym_fx.launch import covering_power, launch, processor_count, with_hints

# What the argument `mask` of the kernels is: their parameter MASK.
NO_MASK = 0
BOOLEAN = 1
ADDITIVE = 2

LOG2_E = math.log2(math.e)
INFINITY = math.inf
#: An added value below this takes a key away, as -inf does, from a query that has others: float32's least.
REMOVED = -1e30
#: Where such values are kept, in powers of two: a query that has no other keys weighs all of its keys alike.
LOWEST = -3e38

#: Columns of the mask that `attention_span_kernel` searches at a time.
SPAN_COLUMNS = 512
#: Elements of the mask that a block of the decode kernel searches at a time: nothing else runs meanwhile, so
#: each step costs the latency of memory. Never fewer, however few the keys are: with tiles of 16 columns the
#: kernel never ended on an H200 (CTK 13.4.92, a boolean mask of 13 keys).
SPAN_ELEMENTS = 4096
#: Up to so many queries count as decode, if with their heads they fill at most 128 rows of 2-byte elements or
#: 32 of 4-byte ones: rows times the square of the element size.
DECODE_QUERIES = 8
DECODE_TILE = 512
#: Most products of queries and keys in one step of the decode kernel: narrow heads would have so many in 64 KiB of
#: keys that the compiler takes minutes over their registers.
MOST_SCORES = 16384
#: Fewest rows that `ct.mma` puts on the tensor cores.
MIN_ROWS = 16
#: Most blocks that share the keys of a head: `attention_combine_kernel` holds all their results in registers.
MAX_SHARES = 64

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@dataclass(frozen=True)
class Tiling:
    """How one attention is cut into blocks.

    Attributes:
        queries: Queries a block owns (prefill).
        keys: Keys of one step.
        occupancy: Blocks that should fit on one multiprocessor.
        worker_warps: Warps that compute, 0 for the compiler's choice; 128 queries need 8, or registers spill.
        blocks: Blocks a multiprocessor should get, from which the number of shares follows (decode).
        shares: Blocks that share the keys of a head, 0 for what follows from `blocks` (decode).
    """

    queries: int
    keys: int
    occupancy: int
    worker_warps: int = 0
    blocks: int = 4
    shares: int = 0


def numbers(block, size, axis):
    """The numbers of the rows (axis 0) or columns (axis 1) of tile number `block`, int32."""
    shape = (size, 1) if axis == 0 else (1, size)
    return block * size + ct.reshape(ct.arange(size, dtype=ct.int32), shape)


def read_mask(mask, batch, head, row, step, shape, kind):
    """One tile of the mask; outside of it no key is seen."""
    index = (batch % mask.shape[0], head % mask.shape[1], row, step)
    tile = ct.reshape(ct.load(mask, index, (1, 1, *shape), padding_mode=ZERO), shape)
    if kind == BOOLEAN:
        return tile != 0
    inside = (numbers(row, shape[0], 0) < mask.shape[2]) & (numbers(step, shape[1], 1) < mask.shape[3])
    return ct.where(inside, ct.astype(tile, ct.float32), -INFINITY)


def masked(scores, factor, tile, kind):
    """The scores under one tile of the mask, and the factor that is still to be applied to them."""
    if kind == BOOLEAN:
        return ct.where(tile, scores, -INFINITY), factor
    added = ct.where(tile > -INFINITY, ct.maximum(tile * LOG2_E, LOWEST), -INFINITY)
    return scores * factor + added, 1.0


def attend(scores, factor, values, top, total, out):
    """One step of online softmax over `scores` [rows, keys], which times `factor` are in powers of two."""
    weights, rescale, top, total = softmax_step(scores, factor, top, total, 1)
    out = ct.mma(ct.astype(weights, values.dtype), values, out * rescale)
    return top, total, out


def softmax_step(scores, factor, top, total, axis):
    """Weights of more keys, along an axis of `scores`; what all before are scaled by; the new maxima and sums."""
    new_top = ct.maximum(top, ct.max(scores, axis=axis, keepdims=True) * factor)
    base = ct.where(new_top > -INFINITY, new_top, 0.0)  # a row without keys so far: no inf - inf
    weights = ct.exp2(scores * factor - base, flush_to_zero=True)
    rescale = ct.exp2(top - base, flush_to_zero=True)
    return weights, rescale, new_top, total * rescale + ct.sum(weights, axis=axis, keepdims=True)


def products(query, k, batch, head, step, keys):
    """query [rows, width] times a tile of keys."""
    width = query.shape[1]
    tile = ct.load(k, (batch, head, 0, step), (1, 1, width, keys), order=(0, 1, 3, 2), padding_mode=ZERO)
    zeros = ct.zeros((query.shape[0], keys), ct.float32)
    return ct.mma(query, ct.reshape(tile, (width, keys)), zeros)


def read_values(v, batch, head, step, shape):
    return ct.reshape(ct.load(v, (batch, head, step, 0), (1, 1, *shape), padding_mode=ZERO), shape)


def reach(mask, batch, head, row, rows, columns, kind):
    """How far the keys that each of `rows` rows sees reach, counted from the end and from the start.

    Both are int32 [rows, 1], and 0 for a row that sees nothing; the span of several rows is the maximum.
    """
    keys = mask.shape[3]
    from_end = ct.zeros((rows, 1), ct.int32)
    from_start = ct.zeros((rows, 1), ct.int32)
    for step in range(ct.cdiv(keys, columns)):
        tile = read_mask(mask, batch, head, row, step, (rows, columns), kind)
        seen = tile if kind == BOOLEAN else tile > REMOVED
        column = numbers(step, columns, 1)
        left = ct.max(ct.where(seen, keys - column, 0), axis=1, keepdims=True)
        right = ct.max(ct.where(seen, column + 1, 0), axis=1, keepdims=True)
        from_end, from_start = ct.maximum(from_end, left), ct.maximum(from_start, right)
    if kind == ADDITIVE:  # such a row weighs all of its keys alike, if they are not at -inf
        inside = numbers(row, rows, 0) < mask.shape[2]
        everything = ct.where(inside & (from_start == 0), keys, 0)
        from_end, from_start = ct.maximum(from_end, everything), ct.maximum(from_start, everything)
    return from_end, from_start


@ct.kernel
def attention_span_kernel(mask, reaches, MASK: Int, ROWS: Int, COLUMNS: Int):
    ct.grid_dependency_control_wait()
    row, batch, head = ct.bid(0), ct.bid(1), ct.bid(2)
    from_end, from_start = reach(mask, batch, head, row, ROWS, COLUMNS, MASK)
    ct.store(reaches, (batch, head, 0, row), ct.reshape(ct.max(from_end), (1, 1, 1, 1)))
    ct.store(reaches, (batch, head, 1, row), ct.reshape(ct.max(from_start), (1, 1, 1, 1)))


@ct.kernel
def attention_prefill_kernel(
    q, k, v, mask, reaches, y, factor,
    QUERIES: Int, KEYS: Int, WIDTH: Int, VALUE_WIDTH: Int, CAUSAL: Flag, MASK: Int, MASK_ROWS: Int,
):  # fmt: skip
    ct.grid_dependency_control_wait()
    batch, head = ct.bid(0) // q.shape[1], ct.bid(0) % q.shape[1]
    row = ct.num_blocks(1) - 1 - ct.bid(1)
    key_head = head // (q.shape[1] // k.shape[1])
    keys = k.shape[2]
    query = ct.load(q, (batch, head, row, 0), (1, 1, QUERIES, WIDTH), padding_mode=ZERO)
    query = ct.reshape(query, (QUERIES, WIDTH))
    top = ct.full((QUERIES, 1), -INFINITY, ct.float32)
    total = ct.zeros((QUERIES, 1), ct.float32)
    out = ct.zeros((QUERIES, VALUE_WIDTH), ct.float32)
    if MASK == NO_MASK:
        full, stop = keys // KEYS, ct.cdiv(keys, KEYS)
        if CAUSAL:
            full = ct.minimum(full, (row * QUERIES + 1) // KEYS)
            stop = ct.minimum(stop, ct.cdiv((row + 1) * QUERIES, KEYS))
        for step in range(full):
            scores = products(query, k, batch, key_head, step, KEYS)
            values = read_values(v, batch, key_head, step, (KEYS, VALUE_WIDTH))
            top, total, out = attend(scores, factor, values, top, total, out)
        for step in range(full, stop):
            scores = products(query, k, batch, key_head, step, KEYS)
            seen = numbers(step, KEYS, 1) < keys
            if CAUSAL:
                seen = seen & (numbers(step, KEYS, 1) <= numbers(row, QUERIES, 0))
            values = read_values(v, batch, key_head, step, (KEYS, VALUE_WIDTH))
            top, total, out = attend(ct.where(seen, scores, -INFINITY), factor, values, top, total, out)
    else:
        mask_row = row if MASK_ROWS > 1 else 0
        place = (batch % mask.shape[0], head % mask.shape[1])
        from_end = ct.load(reaches, (*place, 0, mask_row), (1, 1, 1, 1)).item()
        from_start = ct.load(reaches, (*place, 1, mask_row), (1, 1, 1, 1)).item()
        for step in range((keys - from_end) // KEYS, ct.cdiv(from_start, KEYS)):
            tile = read_mask(mask, batch, head, mask_row, step, (MASK_ROWS, KEYS), MASK)
            scores, rest = masked(products(query, k, batch, key_head, step, KEYS), factor, tile, MASK)
            values = read_values(v, batch, key_head, step, (KEYS, VALUE_WIDTH))
            top, total, out = attend(scores, rest, values, top, total, out)
    out = out * (1.0 / ct.where(total > 0.0, total, 1.0))
    ct.store(y, (batch, row, head, 0), ct.astype(ct.reshape(out, (1, QUERIES, 1, VALUE_WIDTH)), y.dtype))


@ct.kernel
def attention_decode_kernel(
    q, k, v, mask, y, parts, tops, totals, factor,
    HEADS: Int, QUERIES: Int, KEYS: Int, WIDTH: Int, VALUE_WIDTH: Int,
    MASK: Int, MASK_ROWS: Int, COLUMNS: Int, DIRECT: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    batch, head = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1]
    rows = HEADS * QUERIES
    keys = k.shape[2]
    query = ct.load(q, (batch, head, 0, 0, 0), (1, 1, HEADS, QUERIES, WIDTH), padding_mode=ZERO)
    query = ct.reshape(query, (rows, WIDTH))
    first, last = 0, ct.cdiv(keys, KEYS)
    if MASK != NO_MASK:
        from_end, from_start = reach(mask, batch, 0, 0, MASK_ROWS, COLUMNS, MASK)
        first, last = (keys - ct.max(from_end)) // KEYS, ct.cdiv(ct.max(from_start), KEYS)
    share = ct.cdiv(ct.maximum(last - first, 0), ct.num_blocks(1))
    first = first + ct.bid(1) * share
    last = ct.minimum(first + share, last)
    top = ct.full((rows, 1), -INFINITY, ct.float32)
    total = ct.zeros((rows, 1), ct.float32)
    out = ct.zeros((rows, VALUE_WIDTH), ct.float32)
    shape = (KEYS, VALUE_WIDTH)
    for step in range(first, last):
        if MASK == NO_MASK:
            scores = products(query, k, batch, head, step, KEYS)
            scores = ct.where(numbers(step, KEYS, 1) < keys, scores, -INFINITY)
            top, total, out = attend(scores, factor, read_values(v, batch, head, step, shape), top, total, out)
        else:
            tile = read_mask(mask, batch, 0, 0, step, (MASK_ROWS, KEYS), MASK)
            if MASK_ROWS > 1:  # the mask has a row for each query, which all heads share
                tile = ct.broadcast_to(ct.reshape(tile, (1, QUERIES, KEYS)), (HEADS, QUERIES, KEYS))
                tile = ct.reshape(tile, (rows, KEYS))
            scores, rest = masked(products(query, k, batch, head, step, KEYS), factor, tile, MASK)
            top, total, out = attend(scores, rest, read_values(v, batch, head, step, shape), top, total, out)
    if DIRECT:
        out = out * (1.0 / ct.where(total > 0.0, total, 1.0))
        out = ct.permute(ct.reshape(out, (HEADS, QUERIES, VALUE_WIDTH)), (1, 0, 2))
        out = ct.reshape(out, (1, QUERIES, 1, HEADS, VALUE_WIDTH))
        ct.store(y, (batch, 0, head, 0, 0), ct.astype(out, y.dtype))
    else:
        ct.store(parts, (ct.bid(0), ct.bid(1), 0, 0), ct.reshape(out, (1, 1, rows, VALUE_WIDTH)))
        ct.store(tops, (ct.bid(0), ct.bid(1), 0), ct.reshape(top, (1, 1, rows)))
        ct.store(totals, (ct.bid(0), ct.bid(1), 0), ct.reshape(total, (1, 1, rows)))


@ct.kernel
def attention_combine_kernel(parts, tops, totals, y, QUERIES: Int, SHARES: Int, VALUE_WIDTH: Int):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    length, key_heads = y.shape[1], y.shape[2]
    group, position = ct.bid(0) // length, ct.bid(0) % length
    batch, head = ct.bid(1) // key_heads, ct.bid(1) % key_heads
    row = group * QUERIES + position
    top = ct.load(tops, (ct.bid(1), 0, row), (1, SHARES, 1), padding_mode=ZERO)
    top = ct.where(ct.reshape(numbers(0, SHARES, 1), (1, SHARES, 1)) < tops.shape[1], top, -INFINITY)
    total = ct.load(totals, (ct.bid(1), 0, row), (1, SHARES, 1), padding_mode=ZERO)
    part = ct.load(parts, (ct.bid(1), 0, row, 0), (1, SHARES, 1, VALUE_WIDTH), padding_mode=ZERO)
    highest = ct.max(top)
    weights = ct.exp2(top - ct.where(highest > -INFINITY, highest, 0.0))
    whole = ct.sum(total * weights)
    out = ct.sum(ct.reshape(part, (SHARES, VALUE_WIDTH)) * ct.reshape(weights, (SHARES, 1)), axis=0)
    out = ct.reshape(out / ct.where(whole > 0.0, whole, 1.0), (1, 1, 1, 1, VALUE_WIDTH))
    ct.store(y, (batch, position, head, group, 0), ct.astype(out, y.dtype))


def gqa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention in which every query sees every key.

    Args:
        q: Queries [B, Hq, S, D]. Strides are free; q, k and v are copied if their last stride is not 1.
        k: Keys [B, Hk, T, D]; Hq is a multiple of Hk.
        v: Values [B, Hk, T, Dv].
        scale: Factor on the products of queries and keys.

    Returns:
        Contiguous [B, S, Hq, Dv] in the dtype of the queries.
    """
    return _attention(q, k, v, None, scale, False)


def gqa_attention_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`gqa_attention` in which query i sees keys 0 to i."""
    return _attention(q, k, v, None, scale, True)


def gqa_attention_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """`gqa_attention` under `mask`, boolean (True = attend) or added, that broadcasts to [B, Hq, S, T]."""
    return _attention(q, k, v, mask, scale, False)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    batch, heads, length, _ = q.shape
    y = torch.empty((batch, length, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    if not q.shape[3]:  # all products are 0, as those of one column of zeros
        q, k = q.new_zeros(*q.shape[:3], 1), k.new_zeros(*k.shape[:3], 1)
    if scale <= 0:  # the kernels take the maximum before they scale
        q, scale = q * (-1 if scale else 0), -scale or 1.0
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    if mask is not None:
        mask = _compact(mask, k.shape[2])
    if y.numel():
        if is_decode(length, heads // k.shape[1], q.itemsize, mask, causal):
            run_decode(q, k, v, mask, y, scale, _decode_tiling(q, k))
        else:
            run_prefill(q, k, v, mask, y, scale, causal, _prefill_tiling(q, k, causal))
    return y


def _decode_tiling(q: torch.Tensor, k: torch.Tensor) -> Tiling:
    """What was measured to be best for the shape, else what the rules say."""
    pairs, keys, width = k.shape[0] * k.shape[1], k.shape[2], q.shape[3]
    shape_class = (tuning.size_class(pairs), tuning.size_class(keys), width)
    found = tuning.best("attention_decode", shape_class, q.dtype, tuning.arch_of(q.device))
    if found is not None:
        return Tiling(**found)
    return choose_decode_tiling(width, q.itemsize, math.prod(decode_rows(q, k)))


def decode_rows(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    """Query heads of a key head, and queries, padded to the rows of one tile."""
    queries = covering_power(q.shape[2])
    return max(covering_power(q.shape[1] // k.shape[1]), MIN_ROWS // queries), queries


def _prefill_tiling(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Tiling:
    batch, heads, length, width = q.shape
    shape_class = (
        tuning.size_class(batch * heads),
        tuning.size_class(length),
        tuning.size_class(k.shape[2]),
        width,
        causal,
    )
    found = tuning.best("attention_prefill", shape_class, q.dtype, tuning.arch_of(q.device))
    if found is not None:
        return Tiling(**found)
    waves = batch * heads * length / 128 / processor_count(q.device) if causal else 1.0
    return choose_prefill_tiling(width, q.itemsize, waves)


#: What `python -m tilegym_fx.tune` tries.
CANDIDATES = {
    "attention_decode": tuple(
        asdict(Tiling(0, keys, occupancy, blocks=blocks))
        for keys, occupancy in ((32, 4), (64, 3), (128, 2), (256, 1))
        for blocks in (1, 2, 4)
    ),
    "attention_prefill": tuple(
        map(asdict, (Tiling(64, 64, 2), Tiling(64, 128, 2), Tiling(128, 64, 1, 8), Tiling(128, 128, 1, 8)))
    ),
}


def is_decode(length: int, group: int, itemsize: int, mask: torch.Tensor | None, causal: bool) -> bool:
    """Whether the decode kernel takes `length` queries of `group` heads a key head."""
    if causal or length > DECODE_QUERIES or (mask is not None and mask.shape[1] > 1):
        return False
    return covering_power(group) * covering_power(length) * itemsize**2 <= DECODE_TILE


def choose_prefill_tiling(width: int, itemsize: int, waves: float = 1.0) -> Tiling:
    """Tiles of the prefill kernel, as benchmarks/2026-11-29_h200_kernels/gemm_attention.json found them best.

    Args:
        width: D.
        itemsize: Bytes of an element.
        waves: Blocks of 128 queries that a multiprocessor has to work off: many hide what large tiles cost at
            the diagonal.
    """
    if itemsize == 4:  # `ct.mma` unrolls into FMUL and FADD: larger tiles spill, and compile for ten seconds
        return Tiling(32, 32, 1) if width <= 64 else Tiling(16, 32 if width <= 128 else 16, 1)
    if width > 128:
        return Tiling(128, 64, 1, worker_warps=8)
    if width > 64 and waves >= 16:
        return Tiling(128, 128, 1, worker_warps=8)
    return Tiling(64, 128, 2)


def choose_decode_tiling(width: int, itemsize: int, rows: int = MIN_ROWS) -> Tiling:
    """Tiles of the decode kernel: a step reads 64 KiB of keys and as much of values, one block a multiprocessor.

    Of ten tilings this was within 6% of the best at width 128, every batch and length. At 256 that many keys spill
    (1.3 to 1.6 times the best), so two blocks read half of it each (benchmarks/2026-11-30_h200_third, 16 rows, under
    a mask). More rows need the registers for their scores.

    Args:
        width: D.
        itemsize: Bytes of an element.
        rows: Query heads of a key head times queries, padded.
    """
    if itemsize == 4:
        return Tiling(0, 16, 3, blocks=2)
    most = max(1, MOST_SCORES // rows)
    if rows > MIN_ROWS:
        return Tiling(0, min(8192 // covering_power(width), most), 3, blocks=2)
    if width > 128:
        return Tiling(0, min(16384 // covering_power(width), most), 2, blocks=2)
    return Tiling(0, min(32768 // covering_power(width), most), 1, blocks=1)


def run_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor,
    scale: float, causal: bool, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill y [B, S, Hq, Dv] with the prefill kernel; a mask is [1 or B, 1 or Hq, 1 or S, T]."""
    batch, heads, length, width = q.shape
    kind, mask_rows = NO_MASK, 1
    if mask is None:
        mask = reaches = q  # a kernel takes no None; it does not read these
    else:
        kind = BOOLEAN if mask.dtype == torch.uint8 else ADDITIVE
        mask_rows = tiling.queries if mask.shape[2] > 1 else 1
        rows = -(-mask.shape[2] // mask_rows)
        reaches = torch.empty((*mask.shape[:2], 2, rows), dtype=torch.int32, device=q.device)
        grid = (rows, mask.shape[0], mask.shape[1])
        launch(attention_span_kernel, grid, (mask, reaches, kind, mask_rows, SPAN_COLUMNS))
    launch(
        with_hints(attention_prefill_kernel, tiling.occupancy, tiling.worker_warps),
        (batch * heads, -(-length // tiling.queries)),
        (
            q, k, v, mask, reaches, y, scale * LOG2_E,
            tiling.queries, tiling.keys, covering_power(width), covering_power(v.shape[3]), causal, kind, mask_rows,
        ),
    )  # fmt: skip


def run_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor,
    scale: float, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill y [B, S, Hq, Dv] with the decode kernel; a mask is [1 or B, 1, 1 or S, T]."""
    batch, heads, length, width = q.shape
    key_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[3]
    group = heads // key_heads
    group_rows, queries = decode_rows(q, k)
    kind, mask_rows = NO_MASK, 1
    if mask is not None:
        kind = BOOLEAN if mask.dtype == torch.uint8 else ADDITIVE
        mask_rows = queries if mask.shape[2] > 1 else 1
    columns = max(SPAN_COLUMNS, SPAN_ELEMENTS // mask_rows)
    pairs = batch * key_heads
    steps = -(-keys // tiling.keys)
    wanted = tiling.shares or tiling.blocks * processor_count(q.device) // pairs
    shares = max(1, min(wanted, steps, MAX_SHARES))
    rows = group_rows * queries
    parts = tops = totals = q  # a kernel takes no None; it does not write these then
    if shares > 1:
        parts = torch.empty((pairs, shares, rows, value_width), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty((2, pairs, shares, rows), dtype=torch.float32, device=q.device)
    grouped = y.view(batch, length, key_heads, group, value_width)
    launch(
        with_hints(attention_decode_kernel, tiling.occupancy, tiling.worker_warps),
        (pairs, shares),
        (
            q.unflatten(1, (key_heads, group)), k, v, q if mask is None else mask,
            grouped, parts, tops, totals, scale * LOG2_E,
            group_rows, queries, tiling.keys, covering_power(width), covering_power(value_width),
            kind, mask_rows, columns, shares == 1,
        ),
    )  # fmt: skip
    if shares > 1:
        constants = (queries, covering_power(shares), covering_power(value_width))
        launch(attention_combine_kernel, (group * length, pairs), (parts, tops, totals, grouped, *constants))


def _compact(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """The mask in four dimensions: size 1 where it is only expanded, a whole last one, bytes for booleans."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    if mask.shape[3] != keys or (keys > 1 and mask.stride(3) != 1):
        mask = mask.expand(*mask.shape[:3], keys).contiguous()
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
