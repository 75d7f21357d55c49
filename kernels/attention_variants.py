"""Attention with a sink, capped scores, a bias or a fill, in cuTile.

    sink:     y = softmax([scale q k^T + mask, sink]) without its last column, times v
    softcap:  y = softmax(cap * tanh(scale q k^T / cap) + mask) v
    bias:     y = softmax(scale q k^T + bias + mask) v
    fill:     y = softmax(scale q k^T where the mask leaves it, else fill) v, with a bias before or after that

    q [B, Hq, S, D], k [B, Hk, T, D], v [B, Hk, T, Dv], mask [1 or B, 1, S, T], y [B, S, Hq, Dv],
    bias [1 or B, 1 or Hq, 1 or S, T]

Softmax is online and in powers of two: a block keeps for each row the maximum so far, the sum and the
weighted values in float32. A sink is where a row starts: its score is the first maximum, with a sum of one
and no values.

The rows of a block are HEADS query heads of one key head at QUERIES positions: one head and many positions in
prefill; in decode all heads of a key head, so that keys and values are read once, and the keys are shared
among blocks whose results `attention_variant_combine_kernel` adds up in a fixed order.

`attention_variant_span_kernel` finds for each block of rows the span of keys outside of which the mask
takes all away; no other keys are read. A row that is left no key at all weighs all keys alike, as the
eager code does.
"""

from __future__ import annotations

import math
from functools import cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import covering_power, launch, processor_count, with_hints

LOG2_E = math.log2(math.e)
INFINITY = math.inf
#: An added value below this takes a key away from a row that has others.
REMOVED = -1e30
#: Where such values are kept, in powers of two, so that a row without other keys weighs them alike.
LOWEST = -3e38
#: Where a fill below it is kept: what a mask that is added takes away comes before what is filled.
FILLED = -3.2e38
#: What a mask does, the kernels' parameter MASK: it is added, or where it is 0, or where it is not, the score
#: is `fill`; or it is a factor on the score, and what it lacks of 1 is one on `fill`.
ADDED, KEEPS, HIDES, BLENDS = range(4)
#: Columns of the mask that are searched at a time.
SPAN_COLUMNS = 512
#: Up to so many positions all heads of a key head share a block.
DECODE_QUERIES = 8
#: Most rows of such a block.
DECODE_ROWS = 64
#: Fewest rows that `ct.mma` puts on the tensor cores.
MIN_ROWS = 16
#: Fewest keys of a step. A mask read in tiles of 16 columns made the kernels of gqa_attention.py stall on an H200.
MIN_KEYS = 32
MAX_SHARES = 64

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]
Flag = ct.Constant[bool]


def numbers(block, size, axis):
    """The numbers of the rows (axis 0) or columns (axis 1) of tile number `block`, int32."""
    shape = (size, 1) if axis == 0 else (1, size)
    return block * size + ct.reshape(ct.arange(size, dtype=ct.int32), shape)


def read_mask(mask, batch, row, step, shape, kind):
    """One tile of the mask, float32; outside of it -inf if it is added, else 0."""
    tile = ct.load(mask, (batch % mask.shape[0], 0, row, step), (1, 1, *shape), padding_mode=ZERO)
    tile = ct.astype(ct.reshape(tile, shape), ct.float32)
    if kind != ADDED:
        return tile
    inside = (numbers(row, shape[0], 0) < mask.shape[2]) & (numbers(step, shape[1], 1) < mask.shape[3])
    return ct.where(inside, tile, -INFINITY)


def sees(tile, fill, kind):
    """Where a tile of the mask leaves a key something, or the fill does."""
    if kind == ADDED:
        return tile > REMOVED
    return ((tile == 0.0) if kind == HIDES else (tile != 0.0)) | (fill > REMOVED)


def powers(tile):
    """What is added to scores, in powers of two; what takes away stays finite unless it was not."""
    return ct.where(tile > -INFINITY, ct.maximum(tile * LOG2_E, LOWEST), -INFINITY)


def masked(scores, tile, fill, kind):
    """Scores in powers of two under a tile of the mask."""
    if kind == ADDED:
        return scores + powers(tile)
    if kind == BLENDS:
        return scores * tile + fill * (1.0 - tile)
    return ct.where(tile != 0.0, fill, scores) if kind == HIDES else ct.where(tile != 0.0, scores, fill)


def spread(tile, heads, queries):
    """A tile [1 or heads, 1 or queries, keys] for each row of a block, or one for all of them."""
    if tile.shape[0] == 1 and tile.shape[1] == 1:
        return ct.reshape(tile, (1, tile.shape[2]))
    keys = tile.shape[2]
    return ct.reshape(ct.broadcast_to(tile, (heads, queries, keys)), (heads * queries, keys))


@ct.kernel
def attention_variant_span_kernel(mask, reaches, fill, MASK: Int, SINK: Flag, ROWS: Int, COLUMNS: Int):
    """How far the keys that some row of a block sees reach, from the end (0) and from the start (1)."""
    row, batch = ct.bid(0), ct.bid(1)
    keys = mask.shape[3]
    from_end = ct.zeros((ROWS, 1), ct.int32)
    from_start = ct.zeros((ROWS, 1), ct.int32)
    for step in range(ct.cdiv(keys, COLUMNS)):
        seen = sees(read_mask(mask, batch, row, step, (ROWS, COLUMNS), MASK), fill, MASK)
        column = numbers(step, COLUMNS, 1)
        seen = seen & (column < keys) & (numbers(row, ROWS, 0) < mask.shape[2])
        left = ct.max(ct.where(seen, keys - column, 0), axis=1, keepdims=True)
        right = ct.max(ct.where(seen, column + 1, 0), axis=1, keepdims=True)
        from_end, from_start = ct.maximum(from_end, left), ct.maximum(from_start, right)
    if not SINK:  # without a sink a row that sees nothing weighs all of its keys alike
        inside = numbers(row, ROWS, 0) < mask.shape[2]
        everything = ct.where(inside & (from_start == 0), keys, 0)
        from_end, from_start = ct.maximum(from_end, everything), ct.maximum(from_start, everything)
    ct.store(reaches, (batch, row, 0), ct.reshape(ct.max(from_end), (1, 1, 1)))
    ct.store(reaches, (batch, row, 1), ct.reshape(ct.max(from_start), (1, 1, 1)))


@ct.kernel
def attention_variant_kernel(
    q, k, v, mask, reaches, bias, sinks, y, parts, states, inner, outer, fill,
    HEADS: Int, QUERIES: Int, KEYS: Int, WIDTH: Int, VALUE_WIDTH: Int, MASK: Int, MASK_ROWS: Int,
    BIAS_HEADS: Int, BIAS_ROWS: Int, BIAS_LAST: Flag, CAP: Flag, SINK: Flag, DIRECT: Flag,
):  # fmt: skip
    row = ct.num_blocks(0) - 1 - ct.bid(0)  # under a causal mask the last rows have most to do
    groups = ct.cdiv(q.shape[2], HEADS)
    pair, group = ct.bid(1) // groups, ct.bid(1) % groups
    batch, head = pair // k.shape[1], pair % k.shape[1]
    rows = HEADS * QUERIES
    query = ct.load(q, (batch, head, group, row, 0), (1, 1, HEADS, QUERIES, WIDTH), padding_mode=ZERO)
    query = ct.reshape(query, (rows, WIDTH))
    mask_row = row if MASK_ROWS > 1 else 0
    bias_row = row if BIAS_ROWS > 1 else 0
    place = batch % mask.shape[0]
    from_end = ct.load(reaches, (place, mask_row, 0), (1, 1, 1)).item()
    from_start = ct.load(reaches, (place, mask_row, 1), (1, 1, 1)).item()
    first, last = (k.shape[2] - from_end) // KEYS, ct.cdiv(from_start, KEYS)
    share = ct.cdiv(ct.maximum(last - first, 0), ct.num_blocks(2))
    first = first + ct.bid(2) * share
    last = ct.minimum(first + share, last)
    top = ct.full((rows, 1), -INFINITY, ct.float32)
    total = ct.zeros((rows, 1), ct.float32)
    if SINK:  # noqa: SIM102 (a constant, and then a branch of the kernel)
        if ct.bid(2) == 0:
            sink = ct.astype(ct.load(sinks, (head, group), (1, HEADS), padding_mode=ZERO), ct.float32)
            sink = ct.broadcast_to(ct.reshape(sink, (HEADS, 1)), (HEADS, QUERIES))
            top, total = ct.reshape(sink, (rows, 1)) * LOG2_E, ct.full((rows, 1), 1.0, ct.float32)
    out = ct.zeros((rows, VALUE_WIDTH), ct.float32)
    for step in range(first, last):
        tile = ct.load(k, (batch, head, 0, step), (1, 1, WIDTH, KEYS), order=(0, 1, 3, 2), padding_mode=ZERO)
        scores = ct.mma(query, ct.reshape(tile, (WIDTH, KEYS)), ct.zeros((rows, KEYS), ct.float32))
        scores = ct.tanh(scores * inner) * outer if CAP else scores * outer
        bent = read_mask(mask, batch, mask_row, step, (MASK_ROWS, KEYS), MASK)
        bent = spread(ct.reshape(bent, (1, MASK_ROWS, KEYS)), HEADS, QUERIES)
        if BIAS_LAST or BIAS_HEADS == 0:
            scores = masked(scores, bent, fill, MASK)
        if BIAS_HEADS > 0:
            index = (batch % bias.shape[0], head % bias.shape[1], group % bias.shape[2], bias_row, step)
            addend = ct.load(bias, index, (1, 1, BIAS_HEADS, BIAS_ROWS, KEYS), padding_mode=ZERO)
            addend = ct.astype(ct.reshape(addend, (BIAS_HEADS, BIAS_ROWS, KEYS)), ct.float32)
            scores = scores + spread(powers(addend), HEADS, QUERIES)
        if BIAS_HEADS > 0 and not BIAS_LAST:
            scores = masked(scores, bent, fill, MASK)
        if MASK != ADDED:
            scores = ct.where(numbers(step, KEYS, 1) < k.shape[2], scores, -INFINITY)
        new_top = ct.maximum(top, ct.max(scores, axis=1, keepdims=True))
        base = ct.where(new_top > -INFINITY, new_top, 0.0)  # a row without keys so far: no inf - inf
        weights = ct.exp2(scores - base, flush_to_zero=True)
        rescale = ct.exp2(top - base, flush_to_zero=True)
        total = total * rescale + ct.sum(weights, axis=1, keepdims=True)
        values = ct.load(v, (batch, head, step, 0), (1, 1, KEYS, VALUE_WIDTH), padding_mode=ZERO)
        values = ct.reshape(values, (KEYS, VALUE_WIDTH))
        out = ct.mma(ct.astype(weights, values.dtype), values, out * rescale)
        top = new_top
    if DIRECT:
        out = out * (1.0 / ct.where(total > 0.0, total, 1.0))
        out = ct.permute(ct.reshape(out, (HEADS, QUERIES, VALUE_WIDTH)), (1, 0, 2))
        out = ct.reshape(out, (1, QUERIES, 1, HEADS, VALUE_WIDTH))
        ct.store(y, (batch, row, head, group, 0), ct.astype(out, y.dtype))
    else:
        ct.store(parts, (ct.bid(1), ct.bid(2), 0, 0), ct.reshape(out, (1, 1, rows, VALUE_WIDTH)))
        ct.store(states, (0, ct.bid(1), ct.bid(2), 0), ct.reshape(top, (1, 1, 1, rows)))
        ct.store(states, (1, ct.bid(1), ct.bid(2), 0), ct.reshape(total, (1, 1, 1, rows)))


@ct.kernel
def attention_variant_combine_kernel(
    parts, states, y, HEADS: Int, QUERIES: Int, SHARES: Int, VALUE_WIDTH: Int
):  # fmt: skip
    length, key_heads, groups = y.shape[1], y.shape[2], ct.cdiv(y.shape[3], HEADS)
    member, position = ct.bid(0) // length, ct.bid(0) % length
    batch, head = ct.bid(1) // key_heads, ct.bid(1) % key_heads
    block = ct.bid(1) * groups + member // HEADS
    row = member % HEADS * QUERIES + position
    top = ct.load(states, (0, block, 0, row), (1, 1, SHARES, 1), padding_mode=ZERO)
    top = ct.where(ct.reshape(numbers(0, SHARES, 1), (1, 1, SHARES, 1)) < states.shape[2], top, -INFINITY)
    total = ct.load(states, (1, block, 0, row), (1, 1, SHARES, 1), padding_mode=ZERO)
    part = ct.load(parts, (block, 0, row, 0), (1, SHARES, 1, VALUE_WIDTH), padding_mode=ZERO)
    highest = ct.max(top)
    weights = ct.exp2(top - ct.where(highest > -INFINITY, highest, 0.0))
    whole = ct.sum(total * weights)
    out = ct.sum(ct.reshape(part, (SHARES, VALUE_WIDTH)) * ct.reshape(weights, (SHARES, 1)), axis=0)
    out = ct.reshape(out / ct.where(whole > 0.0, whole, 1.0), (1, 1, 1, 1, VALUE_WIDTH))
    ct.store(y, (batch, position, head, member, 0), ct.astype(out, y.dtype))


def sink_attention_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention in which each head has a sink, a score without a value.

    Args:
        q: Queries [B, Hq, S, D]. Strides are free; q, k and v are copied if their last stride is not 1.
        k: Keys [B, Hk, T, D]; Hq is a multiple of Hk.
        v: Values [B, Hk, T, Dv].
        mask: Added to the scores, [1 or B, 1, 1 or S, T], float.
        sinks: [Hq], float.
        scale: Factor on the products of queries and keys.

    Returns:
        Contiguous [B, S, Hq, Dv] in the dtype of the queries.
    """
    return _attention(q, k, v, mask, scale, sinks=sinks)


def softcap_attention_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention whose scores are softcap * tanh(scores / softcap) before the mask is added.

    Arguments as for `sink_attention_masked`.
    """
    return _attention(q, k, v, mask, scale, softcap=softcap)


def biased_attention_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention whose scores have a bias and a mask.

    Arguments as for `sink_attention_masked`, but for two.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores of each head, [Hq or B * Hq, 1 or S, T].
        mask: [1 or B, 1, 1 or S, T]; a float is added, True sets a score to the least number of the queries' dtype.
        scale: Factor on the products.
    """
    by_head = bias.unflatten(0, (-1, q.shape[1] or 1))
    kind = HIDES if mask.dtype == torch.bool else ADDED
    return _attention(q, k, v, mask, scale, bias=by_head, kind=kind, fill=torch.finfo(q.dtype).min)


def biased_attention_filled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    divisor: float,
    fill: float,
    hides: int,
) -> torch.Tensor:
    """Attention whose scores a mask sets to a number, and to which a bias is then added.

    Arguments as for `sink_attention_masked`, but for these.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        bias: [1 or B, 1 or Hq, 1 or S, T], float.
        mask: [1 or B, 1, 1 or S, T]; a float is a factor on the score, what it lacks of 1 one on the number.
        divisor: Of the products.
        fill: The number; minus infinity leaves a query without keys 0.
        hides: What stands in the mask where the number goes.
    """
    kind = BLENDS if mask.dtype != torch.bool else HIDES if hides else KEEPS
    return _attention(q, k, v, mask, 1.0 / divisor, bias=bias, bias_last=True, kind=kind, fill=fill)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    bias_last: bool = False,
    kind: int = ADDED,
    fill: float = 0.0,
) -> torch.Tensor:
    batch, heads, length, width = q.shape
    key_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[3]
    y = torch.empty((batch, length, heads, value_width), dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    if not width:  # all products are 0, as those of one column of zeros
        q, k, width = q.new_zeros(*q.shape[:3], 1), k.new_zeros(*k.shape[:3], 1), 1
    group = heads // key_heads
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    q, k, v, mask = (_unit_stride(tensor) for tensor in (q, k, v, mask))
    fill = fill * LOG2_E if fill == -INFINITY else max(fill * LOG2_E, FILLED)
    members, queries, step, occupancy = pick_tiles(group, length, width, q.itemsize)
    mask_rows = queries if mask.shape[2] > 1 else 1
    reaches = torch.empty((mask.shape[0], -(-mask.shape[2] // mask_rows), 2), dtype=torch.int32, device=q.device)
    has_sink = sinks is not None
    launch(
        attention_variant_span_kernel, (reaches.shape[1], mask.shape[0]),
        (mask, reaches, fill, kind, has_sink, mask_rows, SPAN_COLUMNS),
    )  # fmt: skip
    tiles, pairs = -(-length // queries), batch * key_heads * -(-group // members)
    shares = 1
    if tiles == 1 and length <= DECODE_QUERIES:
        shares = max(1, min(2 * processor_count(q.device) // pairs, -(-keys // step), MAX_SHARES))
    parts = states = q  # a kernel takes no None; it does not write these then
    rows = members * queries
    if shares > 1:
        parts = torch.empty((pairs, shares, rows, value_width), dtype=torch.float32, device=q.device)
        states = torch.empty((2, pairs, shares, rows), dtype=torch.float32, device=q.device)
    grouped = y.view(batch, length, key_heads, group, value_width)
    addend, bias_heads, bias_rows = q.unflatten(1, (key_heads, group)), 0, 1
    if bias is not None:
        addend = _unit_stride(bias).unflatten(1, (key_heads, group) if bias.shape[1] > 1 else (1, 1))
        bias_heads, bias_rows = members if bias.shape[1] > 1 else 1, queries if bias.shape[2] > 1 else 1
    inner, outer = (scale / softcap, softcap * LOG2_E) if softcap is not None else (1.0, scale * LOG2_E)
    launch(
        with_hints(attention_variant_kernel, occupancy), (tiles, pairs, shares),
        (
            q.unflatten(1, (key_heads, group)), k, v, mask, reaches, addend,
            sinks.view(key_heads, group) if sinks is not None else q, grouped, parts, states, inner, outer, fill,
            members, queries, step, covering_power(width), covering_power(value_width), kind, mask_rows,
            bias_heads, bias_rows, bias_last, softcap is not None, has_sink, shares == 1,
        ),
    )  # fmt: skip
    if shares > 1:
        constants = (members, queries, covering_power(shares), covering_power(value_width))
        grid = (group * length, batch * key_heads)
        launch(attention_variant_combine_kernel, grid, (parts, states, grouped, *constants))
    return y


@cache
def pick_tiles(group: int, length: int, width: int, itemsize: int) -> tuple[int, int, int, int]:
    """HEADS, QUERIES, KEYS and blocks a multiprocessor, for `group` heads a key head and `length` queries."""
    if length <= DECODE_QUERIES:
        queries = covering_power(length)
        most = DECODE_ROWS if itemsize <= 2 else MIN_ROWS
        members = max(min(covering_power(group), most // queries), MIN_ROWS // queries, 1)
        return members, queries, MIN_KEYS if itemsize == 4 else max(MIN_KEYS, 8192 // covering_power(width)), 2
    if itemsize == 4:
        return 1, 32 if width <= 64 else 16, MIN_KEYS, 1
    return (1, 64, 64, 2) if width <= 128 else (1, 64, 32, 1)


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
