"""Linear layers of several experts at once: each row goes through the matrix of its own expert.

    out[r] = weight[e] x[r] for the rows r of expert e, which stand together: ends[e - 1] <= r < ends[e]

Matrices are stored [out, in] where OUT_FIRST, else [in, out]: their strides tell. Sums are in float32. Rows from
ends[-1] on belong to no expert and are not written.

Tiles. A grid cannot depend on how many rows an expert has, so a product has N / ROWS + E blocks along N rows, and
each finds its expert and tile of rows from `ends`; those that find none do nothing. Tiles begin at multiples of
ROWS, whoever's rows these are: so the sorted rows are loaded whole, by bulk copies, and only the rows of the
block's own expert are written. Tilings for 2 bytes are the fastest of those that `benchmarks/bench_experts.py
--sweep` tries, measured on an H200 for the experts of three models with 1, 8, 32 and 2048 tokens (report
benchmarks/2026-11-30_h200_second).

Which product. In bfloat16, with more than 16 rows an expert on average, torch's own runs instead of the cuTile
kernel: `torch.nn.functional.grouped_mm`, or `torch.bmm` where every expert has as many. With so many rows it is the
faster one for two models of three. Microseconds for the experts of a layer and 2048 tokens on an H200,
transformers' code with torch's products under torch.compile beside ours in the best tiling
(benchmarks/bench_experts.py, report benchmarks/2026-11-30_h200_second):

    model              torch   ours
    Qwen3-30B-A3B        773    709   (847 as single ops)
    DeepSeek-V2-Lite     601    771
    gpt-oss-20b         1138   1453

With 1, 8 and 32 tokens ours takes 53% to 68% of torch's time. What `grouped_mm` would refuse gets the cuTile
kernel, and so do GPUs for which torch has no grouped kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cuda.tile as ct
import torch
import torch.nn.functional as F

from tilegym_fx.launch import covering_power, launch, with_hints

#: Rows an expert, on average, up to which its weights take the time, and not the products.
FEW_ROWS = 16
#: Major versions of the architectures for which torch has a grouped kernel. On others `grouped_mm` loops over the
#: experts and waits for their ends, which nothing can within a CUDA graph.
GROUPED_KERNELS = (9, 10)
#: `grouped_mm` takes fewer experts than this.
TOO_MANY_EXPERTS = 1024
#: Elements of 16 bytes.
ALIGNED = 8
LATENCY = 10

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]


@dataclass(frozen=True)
class Tiling:
    """How a grouped product is cut: rows of one expert, columns of the result, and steps along the sum."""

    rows: int
    columns: int
    depth: int
    occupancy: int


def own_tile(ends, block, rows, EXPERTS):
    """Expert of a block, its tile of rows, and the first row and the one after the last that are the expert's.

    Tiles are counted from row 0, so that they can be loaded whole; one in which an expert ends and another begins is
    the tile of two blocks. For a block without rows all is 0.
    """
    lane = ct.arange(EXPERTS, dtype=ct.int32)
    stop = ct.gather(ends, lane, padding_value=0)
    start = ct.where(lane == 0, 0, ct.gather(ends, ct.maximum(lane - 1, 0), padding_value=0))
    blocks = ct.where((lane < ends.shape[0]) & (start < stop), (stop + rows - 1) // rows - start // rows, 0)
    through = ct.cumsum(blocks)
    expert = ct.sum(ct.where(through <= block, 1, 0))
    expert = ct.where(expert < EXPERTS, expert, 0)
    chosen = (lane == expert) & (through > block)
    tile = ct.sum(ct.where(chosen, start // rows + block - through + blocks, 0))
    first = ct.maximum(ct.sum(ct.where(chosen, start, 0)), tile * rows)
    last = ct.minimum(ct.sum(ct.where(chosen, stop, 0)), (tile + 1) * rows)
    return expert, tile, first, last


def most_blocks(rows, experts, tile):
    """How many blocks `own_tile` may find rows for: each tile once, and once more for every expert after the first."""
    return min(rows, -(-rows // tile) + max(0, min(rows, experts) - 1))


def steps_of(first, last, width, depth):
    """Steps along the sum, none for a block without rows.

    So such a block runs through a loop of no steps: with the whole product inside an `if`, and rows and halves of
    weights cut out by slices, these kernels never ended on an H200 (CTK 13.4.92).
    """
    return ct.where(first < last, ct.cdiv(width, depth), 0)


def row_numbers(tile, first, last, rows, outside):
    """The rows of a tile, [rows]; `outside` before `first` and from `last` on."""
    row = tile * rows + ct.arange(rows, dtype=ct.int32)
    return ct.where((first <= row) & (row < last), row, outside)


def put_rows(out, row, column, tile):
    """Writes a tile to the rows whose numbers are given, those beyond the last left out."""
    rows, columns = tile.shape
    lane = column * columns + ct.arange(columns, dtype=ct.int32)
    ct.scatter(out, (ct.reshape(row, (rows, 1)), ct.reshape(lane, (1, columns))), tile)


def weight_tile(weight, expert, k, column, shape, out_first, latency):
    """A tile [in, out] of one expert's matrix, which is stored [out, in] or [in, out]."""
    shape3, place = (1, shape[0], shape[1]), (expert, k, column)
    if out_first:
        tile = ct.load(weight, place, shape3, order=(0, 2, 1), padding_mode=ZERO, latency=latency)
    else:
        tile = ct.load(weight, place, shape3, padding_mode=ZERO, latency=latency)
    return ct.reshape(tile, shape)


def grouped_product(x, tile, steps, weight, expert, column, rows, shape, out_first):
    """A tile of x times tiles of one expert's matrix, [depth, columns] each, summed over the steps."""
    sums = ct.zeros((rows, shape[1]), ct.float32)
    for k in range(steps):
        left = ct.load(x, (tile, k), (rows, shape[0]), padding_mode=ZERO)
        sums = ct.mma(left, weight_tile(weight, expert, k, column, shape, out_first, LATENCY), sums)
    return sums


@ct.kernel
def grouped_linear_kernel(
    x, weight, ends, out, OUT_FIRST: ct.Constant[bool], EXPERTS: Int, ROWS: Int, COLUMNS: Int, DEPTH: Int
):  # fmt: skip
    expert, tile, first, last = own_tile(ends, ct.bid(0), ROWS, EXPERTS)
    column = ct.bid(1)
    steps = steps_of(first, last, x.shape[1], DEPTH)
    sums = grouped_product(x, tile, steps, weight, expert, column, ROWS, (DEPTH, COLUMNS), OUT_FIRST)
    put_rows(out, row_numbers(tile, first, last, ROWS, x.shape[0]), column, ct.astype(sums, out.dtype))


@cache
def pick_tiling(rows: int, experts: int, itemsize: int) -> Tiling:
    """A tiling for the rows that an expert has on average."""
    few = rows <= FEW_ROWS * experts
    if itemsize == 4:
        return Tiling(16, 32, 32, 2) if few else Tiling(64, 32, 16, 2)
    if few:
        return Tiling(16, 64, 256, 2) if rows <= 16 else Tiling(16, 64, 128, 3)
    return Tiling(64, 128, 64, 2)


@cache
def tiled(kernel: ct.kernel, tiling: Tiling) -> ct.kernel:
    """The kernel with a tiling's occupancy; tiles of many rows compile for sm_100 only with 1."""
    if tiling.rows <= FEW_ROWS:
        return with_hints(kernel, tiling.occupancy)
    return kernel.replace_hints(occupancy=ct.ByTarget(sm_100=1, sm_103=1, default=tiling.occupancy))


def torch_groups(rows: int, input: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether torch's grouped product is the faster one for so many sorted rows, and takes them.

    Args:
        rows: Of all experts.
        input: What the rows are made of; only its dtype and device count.
        weights: [experts, in, out] or [experts, out, in] each, for rows that lie packed.
    """
    return (
        many_rows(rows, input, weights[0].shape[0])
        and has_grouped_kernel(input.device)
        and all(is_grouped_weight(weight) for weight in weights)
    )


def many_rows(rows: int, input: torch.Tensor, experts: int) -> bool:
    """Whether there are so many rows an expert that torch's product is the faster one, as measured in bfloat16."""
    return input.dtype == torch.bfloat16 and rows > FEW_ROWS * experts > 0


@cache
def has_grouped_kernel(device: torch.device) -> bool:
    """Whether torch multiplies all groups in one launch there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in GROUPED_KERNELS


def is_grouped_weight(weight: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes these matrices, either way round, and packed rows before and after them."""
    return (
        weight.dtype == torch.bfloat16
        and 0 < weight.shape[0] < TOO_MANY_EXPERTS
        and all(size > 0 and size % ALIGNED == 0 for size in weight.shape[1:])
        and is_aligned(weight)
    )


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the last two dimensions are packed one way round, and all other steps are a multiple of 16 bytes."""
    *outer, across, along = matrix.stride()
    if across == 1:
        across, packed = along, along >= matrix.shape[-2]
    else:
        packed = along == 1 and across >= matrix.shape[-1]
    return packed and all(step % ALIGNED == 0 for step in (*outer, across)) and matrix.data_ptr() % 16 == 0


def _grouped(
    input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, columns: int, out_first: bool
) -> torch.Tensor:
    rows, experts = input.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=input.dtype, device=input.device)
    if out.numel() and experts:
        tiling = pick_tiling(rows, experts, input.itemsize)
        blocks = most_blocks(rows, experts, tiling.rows)
        cut = (covering_power(experts), tiling.rows, tiling.columns, tiling.depth)
        grid = (blocks, -(-columns // tiling.columns))
        launch(tiled(grouped_linear_kernel, tiling), grid, (input, weight, ends, out, out_first, *cut))
    return out


def grouped_linear(input: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows of each expert times its matrix.

    Args:
        input: [rows, in], sorted by expert, float32, float16 or bfloat16.
        weight: [experts, in, out], the same dtype, any strides.
        ends: [experts], int32: the row after the last of each expert, never falling; rows that there are not are
            left out.

    Returns:
        [rows, out], contiguous; rows from the last of `ends` on hold anything.
    """
    rows = input.shape[0]
    packed = input.stride(1) == 1 and is_aligned(input)
    if packed and ends.dtype == torch.int32 and torch_groups(rows, input, weight):
        return F.grouped_mm(input, weight, offs=ends.clamp(max=rows))  # torch reads and writes whatever ends say
    out_first = weight.stride(1) == 1
    return _grouped(input, weight.transpose(1, 2) if out_first else weight, ends, weight.shape[2], out_first)


def batched_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As many rows for every expert: [experts, rows, in] times [experts, in, out].

    Args:
        input: Any strides, float32, float16 or bfloat16.
        weight: The same dtype.

    Returns:
        [experts, rows, out], contiguous.
    """
    experts, rows, width = input.shape
    if input.is_cuda and many_rows(experts * rows, input, experts):
        return torch.bmm(input, weight)
    ends = torch.arange(rows, (experts + 1) * rows, max(rows, 1), dtype=torch.int32, device=input.device)
    out = _grouped(input.reshape(experts * rows, width), weight, ends, weight.shape[2], False)
    return out.view(experts, rows, weight.shape[2])
