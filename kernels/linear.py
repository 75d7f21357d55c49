"""Linear layers in cuTile: y = x W^T, with a bias or a residual added before the one rounding at the end, if any.

    x [rows, K], weight [features, K], y [rows, features]; products are summed in float32, for every dtype.

Three kernels. `linear_gemv_kernel` serves one row: it is bound by reading W, so a block owns FEATURES rows
of W and walks along K in steps of DEPTH, multiplying into a [FEATURES, DEPTH] float32 tile that is summed
over K once, at the end. `linear_gemm_kernel` serves the rest with `ct.mma` on ROWS x FEATURES x DEPTH
tiles; these are numbered so that GROUP_ROWS rows share the tiles of W while they are in the L2 cache.
When its tiles are too few to fill the GPU, K is cut into SPLIT parts that `linear_reduce_kernel` sums,
always in the same order, so a result never depends on timing. When they are many, a tiling may be persistent: no
more blocks than the GPU holds walk over the tiles, so that one tile is stored while the next is being loaded. Of few
rows W may be the left operand: a warpgroup multiplies 64 rows of its left operand at least, and 8 columns of its right.

W may be row-major ([M, K], nn.Linear) or column-major (a transposed view of [K, M], GPT-2's Conv1D): the
loads take the strides as they are. All sizes are allowed: tiles that stick out are filled with zeros, which
add nothing. `ct.mma` on float32 tiles is a true float32 product (FMUL and FADD in the machine code, no
tf32).

`choose_tiling` picks tiles by shape, by rules that benchmarks/bench_gemm_attention.py measured. Where
`python -m tilegym_fx.tune` has measured one of CANDIDATES to be faster for a shape, that is taken instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod

import cuda.tile as ct
import torch

from tilegym_fx import tuning
from tilegym_fx.launch import H200_PROCESSORS, covering_power, launch, processor_count, with_hints

from .gated_activation import gated

# What is added to the product before it is rounded: the parameter EPILOGUE of the kernels.
NOTHING = 0
BIAS = 1  # [features], one value a column
RESIDUAL = 2  # [rows, features], one value an element
# Or by what it is multiplied: act(gate), [rows, features]. GATE + SILU or GATE + GELU_TANH of gated_activation.py.
GATE = 3

#: Rows of x whose tiles share the tiles of W in the L2 cache.
GROUP_ROWS = 2048
#: Prefetch depth of W: the deepest, because nothing else uses the memory meanwhile.
LATENCY = 10
#: A part of a split K keeps at least this much of it, so that its pipeline fills.
MIN_DEPTH = 512
MAX_SPLIT = 8
#: Rows of W of a GEMV block whose blocks fill the GPU in a single wave.
GEMV_FEATURES = 16
#: Elements of y that one block of the reduction sums.
REDUCE_WIDTH = 512

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@dataclass(frozen=True)
class Tiling:
    """How one product is cut into blocks.

    Attributes:
        rows: Rows of x a block owns; 1 selects the GEMV kernel.
        features: Rows of W, columns of y.
        depth: Step along K.
        occupancy: Blocks that should fit on one multiprocessor.
        worker_warps: Warps that compute, 0 for the compiler's choice; 256 x 128 needs 8, or registers spill.
        cluster: Multiprocessors that work on one tile, each on its part, and share what they load (sm_90 on).
        tma: Whether loads may use the bulk-copy engine (GEMV; the GEMM always may).
        split: Parts of K computed by blocks of their own.
        latency: Prefetch depth of the GEMM's loads, 1 to 10, 0 for the compiler's choice. With deep ones a persistent
            kernel spills registers: on sm_90 from 8 on and, where a residual is added, 256 x 128 from 6 on.
        persistent: Whether a block of the GEMM computes tile after tile, not one.
        swap: Whether W is the left operand of the GEMM, so that as few as 8 rows of x fill a tile.
    """

    rows: int
    features: int
    depth: int
    occupancy: int = 1
    worker_warps: int = 0
    cluster: int = 1
    tma: bool = True
    split: int = 1
    latency: int = 0
    persistent: bool = False
    swap: bool = False


def finished(sums, extra, row, column, epilogue):
    """The float32 sums of one tile with the tile of the bias, the residual or the gate that belongs to it."""
    if epilogue == BIAS:
        bias = ct.load(extra, (column,), (sums.shape[1],), padding_mode=ZERO)
        sums = sums + ct.reshape(ct.astype(bias, ct.float32), (1, sums.shape[1]))
    if epilogue == RESIDUAL:
        sums = sums + ct.astype(ct.load(extra, (row, column), sums.shape, padding_mode=ZERO), ct.float32)
    if epilogue >= GATE:
        gate = ct.load(extra, (row, column), sums.shape, padding_mode=ZERO)
        sums = gated(gate, ct.astype(sums, gate.dtype), epilogue - GATE, gate.dtype == ct.float32)
    return sums


@ct.kernel
def linear_gemv_kernel(x, weight, extra, y, EPILOGUE: Int, FEATURES: Int, DEPTH: Int, TMA: Flag):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column = ct.bid(0)
    products = ct.zeros((FEATURES, DEPTH), ct.float32)
    for k in range(ct.num_tiles(x, 1, (1, DEPTH))):
        left = ct.load(x, (0, k), (1, DEPTH), padding_mode=ZERO, allow_tma=TMA)
        shape = (FEATURES, DEPTH)
        right = ct.load(weight, (column, k), shape, padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)
        products = products + ct.astype(right, ct.float32) * ct.astype(left, ct.float32)
    sums = ct.reshape(ct.sum(products, axis=1), (1, FEATURES))
    ct.store(y, (0, column), ct.astype(finished(sums, extra, 0, column, EPILOGUE), y.dtype))


@ct.kernel
def linear_gemm_kernel(
    x, weight, extra, y, parts, EPILOGUE: Int, ROWS: Int, FEATURES: Int, DEPTH: Int,
    SPLIT: Int, LATENCY: Int, PERSISTENT: Flag, SWAP: Flag,
):  # fmt: skip
    ct.grid_dependency_control_wait()
    shape = (ROWS, FEATURES, DEPTH)
    if PERSISTENT:
        tiles = ct.cdiv(x.shape[0], ROWS) * ct.cdiv(weight.shape[0], FEATURES)
        for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
            linear_tile(x, weight, extra, y, parts, tile, EPILOGUE, shape, SPLIT, LATENCY, SWAP)
    else:
        linear_tile(x, weight, extra, y, parts, ct.bid(0), EPILOGUE, shape, SPLIT, LATENCY, SWAP)


def linear_tile(x, weight, extra, y, parts, tile, epilogue, shape, split, latency, swap):
    """Compute and store one tile: of y, or of the part of K that belongs to the block."""
    rows, features, depth = shape
    row, column = grouped(tile, ct.cdiv(x.shape[0], rows), ct.cdiv(weight.shape[0], features), rows)
    steps = ct.cdiv(x.shape[1], depth)
    first = ct.bid(1) * ct.cdiv(steps, split)
    last = ct.minimum(first + ct.cdiv(steps, split), steps)
    sums = product(x, weight, row, column, first, last, shape, latency, swap)
    if split == 1:
        ct.store(y, (row, column), ct.astype(finished(sums, extra, row, column, epilogue), y.dtype))
    else:
        ct.store(parts, (ct.bid(1), row, column), ct.reshape(sums, (1, rows, features)))


def product(x, weight, row, column, first, last, shape, latency, swap):
    """The float32 sums [ROWS, FEATURES] of one tile over some of the steps along K."""
    rows, features, depth = shape
    hint = latency if latency else None
    if swap:
        turned = ct.zeros((features, rows), ct.float32)
        for k in range(first, last):
            left = ct.load(weight, (column, k), (features, depth), padding_mode=ZERO, latency=hint)
            right = ct.load(x, (k, row), (depth, rows), order=(1, 0), padding_mode=ZERO, latency=hint)
            turned = ct.mma(left, ct.astype(right, weight.dtype), turned)
        return ct.transpose(turned)
    sums = ct.zeros((rows, features), ct.float32)
    for k in range(first, last):
        left = ct.load(x, (row, k), (rows, depth), padding_mode=ZERO, latency=hint)
        right = ct.load(weight, (k, column), (depth, features), order=(1, 0), padding_mode=ZERO, latency=hint)
        sums = ct.mma(ct.astype(left, weight.dtype), right, sums)
    return sums


def grouped(tile, rows, columns, height):
    """Row and column of a tile by its number: down GROUP_ROWS rows, then the next column, at the end the next group.

    Args:
        tile: The number.
        rows: Tiles that x has.
        columns: Tiles that W has.
        height: Rows of a tile.
    """
    group = GROUP_ROWS // height
    width = group * columns
    start = tile // width * group
    tall = ct.minimum(rows - start, group)
    return start + tile % width % tall, tile % width // tall


@ct.kernel
def linear_reduce_kernel(parts, extra, y, EPILOGUE: Int, WIDTH: Int, SPLIT: Int):
    ct.grid_dependency_control_wait()
    column, row = ct.bid(0), ct.bid(1)
    sums = ct.zeros((1, WIDTH), ct.float32)
    for part in range(SPLIT):
        tile = ct.load(parts, (part, row, column), (1, 1, WIDTH), padding_mode=ZERO)
        sums = sums + ct.reshape(tile, (1, WIDTH))
    ct.store(y, (row, column), ct.astype(finished(sums, extra, row, column, EPILOGUE), y.dtype))


@lru_cache(maxsize=4096)
def choose_tiling(
    rows: int, features: int, depth: int, *,
    itemsize: int = 2, row_major: bool = True, processors: int = H200_PROCESSORS,
) -> Tiling:  # fmt: skip
    """The tiling for a product of these sizes.

    The rules were drawn from the sweeps in benchmarks/2026-11-29_h200_kernels and, for weights on the left and
    persistent blocks, in benchmarks/2026-12-01_h200. Blocks that fill the GPU in one wave, or in many, are worth more
    than most. A single row of x with many features goes to the matrix units, as one of 8 rows: their tiles arrive
    by bulk copies, which keep more bytes in flight than loads to registers.

    Args:
        rows: Rows of x.
        features: Rows of W.
        depth: K.
        itemsize: Bytes of an element.
        row_major: Whether W is contiguous along K.
        processors: Multiprocessors of the GPU.
    """
    if rows == 1 and (itemsize == 4 or not row_major or features <= 2 * GEMV_FEATURES * processors):
        return _gemv_tiling(features, depth, itemsize, row_major, processors)
    if itemsize == 4:  # multiply-add instructions, unrolled: larger tiles spill registers
        tiling = Tiling(16, 64, 32) if rows <= 16 else Tiling(64, 64, 16)
    elif rows <= 64:  # bound by reading W
        return _short_tiling(rows, features, depth, row_major, processors)
    elif fills_gpu_often(rows, features, itemsize):
        return Tiling(128, 256, 64, worker_warps=8, latency=6, persistent=True)
    else:
        tiles = -(-rows // 128) * -(-features // 128)
        is_one_wave = 3 * processors <= 4 * tiles <= 4 * processors
        tiling = Tiling(128, 128, 64, occupancy=1 if is_one_wave else 2)
    split = _split(tiling, rows, features, depth, processors)
    return tiling if split == 1 else replace(tiling, split=split)


def fills_gpu_often(rows: int, features: int, itemsize: int) -> bool:
    """Whether a product has so many tiles of 128 x 256 that persistent blocks compute two or more of them each."""
    return itemsize < 4 and rows > 64 and rows * features >= 2048 * 4096


def _gemv_tiling(features: int, depth: int, itemsize: int, row_major: bool, processors: int) -> Tiling:
    if not row_major:  # W is contiguous along the features: a whole sector of 32 bytes of them in each row
        return Tiling(1, 16, 512 // itemsize, occupancy=4)
    if features <= 8 * processors and depth >= 4096:
        return Tiling(1, 2, 2048, occupancy=4)
    waves = -(-features // GEMV_FEATURES) / (2 * processors)
    if 0.8 <= waves <= 1.0:
        return Tiling(1, GEMV_FEATURES, 1024, occupancy=2)
    return Tiling(1, 4, 1024, occupancy=4, tma=False)


def _short_tiling(rows: int, features: int, depth: int, row_major: bool, processors: int) -> Tiling:
    """Up to 64 rows: W on the left, whose tiles of 64 features are as narrow as the matrix units take them."""
    if rows > 32 or not row_major:
        return _short_tiling_of_x(rows, features, depth, processors)
    tiles = -(-features // 64)
    tiling = Tiling(row_tile_size(rows), 64, 128, occupancy=3 if tiles > processors else 2, swap=True)
    if 4 * tiles >= processors and (depth <= 8192 or tiles >= processors):
        return tiling
    return replace(tiling, split=_split(tiling, rows, features, depth, processors))


def row_tile_size(rows: int) -> int:
    """Rows of a tile that holds all rows, 32 at most, where W is the left operand."""
    return max(8, covering_power(rows))


def _short_tiling_of_x(rows: int, features: int, depth: int, processors: int) -> Tiling:
    """x on the left: narrow tiles as long as these fill the GPU, wide ones for many features or long K."""
    tiling = Tiling(64, 128, 64, occupancy=3)
    if rows <= 16:
        wide = features >= 64 * processors or depth > 8192
        tiling = Tiling(16, 64 if wide else 32, 128, occupancy=4)
    elif rows <= 32 and features <= 16 * processors:
        tiling = Tiling(32, 32, 256, occupancy=3)
    elif rows <= 32 and features >= 96 * processors:
        tiling = Tiling(32, 128, 128, occupancy=2)
    return replace(tiling, split=_split(tiling, rows, features, depth, processors))


def _split(tiling: Tiling, rows: int, features: int, depth: int, processors: int) -> int:
    """Parts of K where the tiles alone leave many multiprocessors idle, each of which gets 128 features."""
    tiles = -(-rows // tiling.rows) * -(-features // tiling.features)
    if 4 * tiles >= 3 * processors:
        return 1
    steps = -(-depth // tiling.depth)
    blocks = processors * (max(1, 128 // tiling.features) if rows <= 64 else 2)
    parts = max(1, min(blocks // tiles, depth // MIN_DEPTH, MAX_SPLIT))
    return -(-steps // -(-steps // parts))  # no part stays empty


def linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input` [..., K] times `weight` [M, K] transposed.

    Args:
        input: Rows to project, any leading shape and strides.
        weight: One row per output feature; a unit stride in either dimension avoids a copy.

    Returns:
        Contiguous [..., M] in the dtype of the input.
    """
    return project(input, weight, None, NOTHING)


def linear_bias(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`linear` plus `bias` [M], added in float32 before the result is rounded."""
    return project(input, weight, bias, BIAS)


def linear_add(input: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`linear` plus `residual` [..., M], added in float32 before the one rounding, to their common dtype."""
    return project(input, weight, residual, RESIDUAL)


def linear_fp32(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear` whose float32 sums are not rounded: [..., M], float32."""
    return project(input, weight, None, NOTHING, torch.float32)


def linear_fp32_weight(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear_fp32` with a float32 weight for rows of 16 bits."""
    return project(input, weight, None, NOTHING, torch.float32)


def project(
    input: torch.Tensor, weight: torch.Tensor, extra: torch.Tensor | None, epilogue: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product with any epilogue; `dtype` is that of the result, by default the input's."""
    features, depth = weight.shape
    x = _unit_stride(as_matrix(input))
    weight = _unit_stride(weight)
    dtype = dtype or x.dtype
    if epilogue == RESIDUAL:
        if extra.dtype != dtype:
            dtype = torch.promote_types(dtype, extra.dtype)
        if extra.dim() != input.dim() or extra.numel() != x.shape[0] * features:
            extra = extra.expand(*input.shape[:-1], features)
        extra = _unit_stride(as_matrix(extra))
    y = torch.empty((x.shape[0], features), dtype=dtype, device=x.device)
    if not depth:
        y.zero_() if extra is None else y.copy_(extra)
    elif y.numel():
        run_tiling(x, weight, extra, y, epilogue, _tiling(x, weight))
    return y.view(*input.shape[:-1], features)


def _tiling(x: torch.Tensor, weight: torch.Tensor) -> Tiling:
    """What was measured to be best for the shape, else what the rules say."""
    rows, (features, depth), row_major = x.shape[0], weight.shape, weight.stride(1) == 1
    shape_class = (tuning.size_class(rows), features, depth, row_major)
    found = tuning.best("linear", shape_class, weight.dtype, tuning.arch_of(x.device))
    if found is not None:
        return Tiling(**found)
    return choose_tiling(
        rows, features, depth, itemsize=weight.itemsize, row_major=row_major, processors=processor_count(x.device)
    )


def _candidates(shape_class: tuning.ShapeClass) -> tuple[tuning.Config, ...]:
    rows, _, _, row_major = shape_class
    if rows == 1 and row_major:
        wide = (Tiling(16, 64, 128, 4), *(Tiling(8, 64, 128, o, swap=True) for o in (2, 3)))
        narrow = (Tiling(1, 2, 2048, 4), Tiling(1, 4, 1024, 4, tma=False), Tiling(1, 8, 512, 5))
        tilings = (*narrow, Tiling(1, 16, 512, 3), Tiling(1, 16, 1024, 2), *wide)
    elif rows <= 16:
        turned = tuple(Tiling(row_tile_size(rows), 64, 128, o, swap=True) for o in (2, 3, 4))
        tilings = (*turned, *(Tiling(16, features, 128, o) for features in (32, 64) for o in (2, 4)))
    elif rows <= 64:
        turned = tuple(Tiling(32, 64, 128, o, swap=True) for o in (2, 3, 4)) if rows <= 32 else ()
        tilings = (
            *turned,
            Tiling(32, 32, 128, 4),
            Tiling(32, 32, 256, 3),
            Tiling(32, 128, 128, 2),
            Tiling(64, 128, 64, 3),
        )
    else:
        large = Tiling(256, 128, 64, worker_warps=8)
        wide = Tiling(128, 256, 64, worker_warps=8, latency=6)
        walking = tuple(replace(tiling, persistent=True) for tiling in (large, wide))
        tilings = (Tiling(128, 128, 64, 1), Tiling(128, 128, 64, 2), large, *walking)
    return tuple(map(asdict, tilings))


#: What `python -m tilegym_fx.tune` tries.
CANDIDATES = {"linear": _candidates}


def run_tiling(
    x: torch.Tensor, weight: torch.Tensor, extra: torch.Tensor | None, y: torch.Tensor,
    epilogue: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill y [rows, features], cut as `tiling` says; the sweep in benchmarks/ calls this too."""
    rows, features = y.shape
    extra = weight if extra is None else extra  # a kernel takes no None; it does not read this
    columns = -(-features // tiling.features)
    if tiling.rows == 1:
        kernel = with_hints(linear_gemv_kernel, tiling.occupancy, tiling.worker_warps, tiling.cluster)
        launch(kernel, (columns,), (x, weight, extra, y, epilogue, tiling.features, tiling.depth, tiling.tma))
        return
    split = tiling.split
    parts = x if split == 1 else torch.empty((split, rows, features), dtype=torch.float32, device=y.device)
    kernel = with_hints(linear_gemm_kernel, tiling.occupancy, tiling.worker_warps, tiling.cluster)
    cut = (tiling.rows, tiling.features, tiling.depth, split, tiling.latency, tiling.persistent, tiling.swap)
    blocks = -(-rows // tiling.rows) * columns
    if tiling.persistent:
        blocks = resident_blocks(blocks, tiling.occupancy, x.device, share=tiling.cluster * split)
    launch(kernel, (blocks, split), (x, weight, extra, y, parts, epilogue, *cut))
    if split > 1:
        grid = (-(-features // REDUCE_WIDTH), rows)
        launch(linear_reduce_kernel, grid, (parts, extra, y, epilogue, REDUCE_WIDTH, split))


def resident_blocks(tiles: int, occupancy: int, device: torch.device, *, share: int = 1) -> int:
    """Blocks that walk over the tiles: as many as the GPU holds at once, or one a tile where these are fewer.

    Args:
        tiles: How many there are.
        occupancy: Blocks that fit on one multiprocessor.
        device: The GPU.
        share: By how much fewer blocks fit, as several multiprocessors work on one, or on parts of K.
    """
    return max(1, min(tiles, processor_count(device) * occupancy // share))


def as_matrix(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., columns] as a matrix; of rows without columns torch could not tell the number."""
    columns = rows.shape[-1]
    return rows.reshape(-1 if columns else prod(rows.shape[:-1]), columns)


def _unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if 1 in matrix.stride() else matrix.contiguous()
