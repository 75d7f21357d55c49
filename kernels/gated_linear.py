"""Gate and up projections with the gate, y = act(n Wg^T) * (n Wu^T), in one cuTile launch.

    x [rows, K], Wg and Wu [features, K], y [rows, features]; act is SiLU or GELU (tanh form)
    n is x, or the RMS norm of x times a weight

A decode step is bound by reading the weights, so what counts is that one launch reads all that share an
input: the GPU drains and fills up once instead of two or three times, and x, the norm and the gate never
travel through memory. Gate and up are rounded as they are on their own, then multiplied as
gated_activation.py does.

`gated_gemv_kernel` serves one row: a block multiplies FEATURES rows of each weight in float32 registers,
[FEATURES, DEPTH] at a time, and sums over K at the end. `gated_gemm_kernel` serves few rows on the matrix
units, as linear.py does, and multiplies each tile of x by both weights. Of many rows the gate is a product of its own,
and that of up reads it when it stores: two sums in one block leave each half as wide tiles, and cannot be persistent
(the compiler has the matrix units wait after every step).

The norm. Its scale 1 / sqrt(mean(x^2) + eps) is one number for a row, so it commutes with the product: x is
multiplied by the norm's weight on its way in, its squares are summed beside, and the finished sums are
scaled. Nothing waits for a pass over x, and nothing is rounded before the end. That is for one row. More of
them are normed by a launch of its own (norm.py), since tiles that pass through registers before they reach
the matrix units keep these waiting: for 8 rows of Llama-3.1-8B, q, k and v took 28 us so and 20 us apart.

Overlap. A kernel that waits for its predecessor before it touches memory may start before that one has ended
(launch.py). The kernels for one row let their successor do so at once, which hides the start of its blocks: 125 us
instead of 132 for a layer of Llama-3.1-8B. Those for the matrix units do not: there it cost 17%.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial

import cuda.tile as ct
import torch

from tilegym_fx import tuning
from tilegym_fx.launch import H200_PROCESSORS, launch, processor_count

from .gated_activation import GELU_TANH, SILU, gated
from .linear import (
    GATE,
    LATENCY,
    Flag,
    _unit_stride,
    as_matrix,
    fills_gpu_often,
    grouped,
    linear,
    project,
    row_tile_size,
)
from .norm import rms_norm, rms_norm_plus_one

# The norm before the product: the parameter NORM of the kernels.
NO_NORM = 0
RMS = 1  # times weight
RMS_PLUS_ONE = 2  # times 1 + weight

ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]


@dataclass(frozen=True)
class Tiling:
    """How a fused product is cut into blocks.

    Attributes:
        rows: Rows of x a block owns; 1 selects the kernel for one row.
        features: Rows of each W, columns of the result.
        depth: Step along K.
        occupancy: Blocks that should fit on one multiprocessor.
        worker_warps: Warps that compute, 0 for the compiler's choice.
        swap: Whether the weights are the left operands, so that as few as 8 rows of x fill a tile.
    """

    rows: int
    features: int
    depth: int
    occupancy: int
    worker_warps: int = 0
    swap: bool = False


def row_tile(x, norm_weight, k, squares, depth, norm):
    """Tile k of a row as it is multiplied, float32 [1, DEPTH], and its squares added to those before."""
    tile = ct.astype(ct.load(x, (0, k), (1, depth), padding_mode=ZERO), ct.float32)
    if norm == NO_NORM:
        return tile, squares
    factor = ct.astype(ct.load(norm_weight, (k,), (depth,), padding_mode=ZERO), ct.float32)
    if norm == RMS_PLUS_ONE:
        factor = factor + 1.0
    return tile * ct.reshape(factor, (1, depth)), squares + tile * tile


def weight_rows(weight, column, k, shape):
    """A tile [FEATURES, DEPTH] of W [features, K] in float32."""
    return ct.astype(ct.load(weight, (column, k), shape, padding_mode=ZERO, latency=LATENCY), ct.float32)


def finished(products, squares, hidden, eps, norm):
    """[1, FEATURES]: products summed over K and scaled, where there is a norm, by 1 / sqrt(mean(x^2) + eps)."""
    sums = ct.reshape(ct.sum(products, axis=1), (1, products.shape[0]))
    if norm == NO_NORM:
        return sums
    return sums * ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / hidden) + eps)


@ct.kernel
def gated_gemv_kernel(
    x, norm_weight, gate_weight, up_weight, out, eps,
    NORM: Int, HIDDEN: Int, KIND: Int, FEATURES: Int, DEPTH: Int,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    column = ct.bid(0)
    squares = ct.zeros((1, DEPTH), ct.float32)
    gates = ct.zeros((FEATURES, DEPTH), ct.float32)
    ups = ct.zeros((FEATURES, DEPTH), ct.float32)
    for k in range(ct.cdiv(x.shape[1], DEPTH)):
        left, squares = row_tile(x, norm_weight, k, squares, DEPTH, NORM)
        gates = gates + weight_rows(gate_weight, column, k, (FEATURES, DEPTH)) * left
        ups = ups + weight_rows(up_weight, column, k, (FEATURES, DEPTH)) * left
    gate = finished(gates, squares, HIDDEN, eps, NORM)
    up = finished(ups, squares, HIDDEN, eps, NORM)
    store_gated(gate, up, out, 0, column, KIND)


@ct.kernel
def gated_gemm_kernel(x, gate_weight, up_weight, out, KIND: Int, ROWS: Int, FEATURES: Int, DEPTH: Int, SWAP: Flag):
    ct.grid_dependency_control_wait()
    row, column = grouped(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.cdiv(out.shape[1], FEATURES), ROWS)
    gate = no_sums(ROWS, FEATURES, SWAP)
    up = no_sums(ROWS, FEATURES, SWAP)
    for k in range(ct.cdiv(x.shape[1], DEPTH)):
        left = x_tile(x, row, k, (ROWS, DEPTH), SWAP)
        gate = multiplied(left, gate_weight, k, column, (FEATURES, DEPTH), gate, SWAP)
        up = multiplied(left, up_weight, k, column, (FEATURES, DEPTH), up, SWAP)
    if SWAP:
        gate, up = ct.transpose(gate), ct.transpose(up)
    store_gated(gate, up, out, row, column, KIND)


def no_sums(rows, features, swap):
    """Zeros for the sums of a tile, which are turned where the weight is the left operand."""
    return ct.zeros((features, rows) if swap else (rows, features), ct.float32)


def x_tile(x, row, k, shape, swap):
    """A tile [ROWS, DEPTH] of x; turned, where it is to be the right operand."""
    if swap:
        return ct.load(x, (k, row), (shape[1], shape[0]), order=(1, 0), padding_mode=ZERO)
    return ct.load(x, (row, k), shape, padding_mode=ZERO)


def multiplied(of_x, weight, k, column, shape, sums, swap):
    """`sums` and the product of a tile of x and one, [FEATURES, DEPTH], of W [features, K]."""
    if swap:
        return ct.mma(ct.load(weight, (column, k), shape, padding_mode=ZERO), of_x, sums)
    return ct.mma(of_x, ct.load(weight, (k, column), (shape[1], shape[0]), order=(1, 0), padding_mode=ZERO), sums)


def store_gated(gate, up, out, row, column, kind):
    """act(gate) * up of one tile, both rounded as the separate products are."""
    gate, up = ct.astype(gate, out.dtype), ct.astype(up, out.dtype)
    result = gated(gate, up, kind, out.dtype == ct.float32)
    ct.store(out, (row, column), ct.astype(result, out.dtype))


@lru_cache(maxsize=4096)
def choose_tiling(rows: int, features: int, *, weights: int = 1, itemsize: int = 2, row_major: bool = True,
                  processors: int = H200_PROCESSORS) -> Tiling:  # fmt: skip
    """The tiling for a fused product, as benchmarks/bench_fused.py found them best (benchmarks/2026-12-01_h200 last).

    Args:
        rows: Rows of x.
        features: Columns of all results together.
        weights: Products of a block, which share its registers and memory: two for gate and up.
        itemsize: Bytes of an element.
        row_major: Whether the weights are contiguous along K.
        processors: Multiprocessors of the GPU.
    """
    if rows == 1 and row_major:
        return _row_tiling(features // weights, weights, itemsize, processors)
    if itemsize == 4:  # multiply-add instructions, unrolled: larger tiles spill registers
        return Tiling(16, 64 // weights, 32, 1) if rows <= 16 else Tiling(64, 64 // weights, 16, 1)
    if rows > 64:
        return Tiling(128, 256 // weights, 64, 1, worker_warps=8)
    if rows <= 32 and row_major:
        return Tiling(row_tile_size(rows), 64, 128, 2, swap=True)
    if rows <= 32 and weights == 1 and features < 64 * processors:
        return Tiling(16 if rows <= 16 else 32, 32, 128, 4)
    if rows > 16:
        return Tiling(32, 128 // weights, 64, 3) if rows <= 32 else Tiling(64, 128 // weights, 64, 2)
    return Tiling(16, 64 // weights, 128, 4)


def _row_tiling(features: int, weights: int, itemsize: int, processors: int) -> Tiling:
    """16 rows of each weight, or half as many where the last wave of blocks would leave the GPU rather empty."""
    if weights == 1:
        return Tiling(1, 16, 1024 // itemsize, 3)
    waves = -(-features // 16) / (4 * processors)
    if waves >= 0.8 * math.ceil(waves):
        return Tiling(1, 16, 512 // itemsize, 4)
    return Tiling(1, 8, 1024 // itemsize, 4)


def best_tiling(kernel: str, x: torch.Tensor, weight: torch.Tensor, features: int, *, weights: int = 1) -> Tiling:
    """What was measured to be best for the shape, else what the rules say; arguments as for `choose_tiling`."""
    rows, depth = x.shape
    row_major = weight.stride(1) == 1
    shape_class = (tuning.size_class(rows), features, depth, row_major)
    found = tuning.best(kernel, shape_class, x.dtype, tuning.arch_of(x.device))
    if found is not None:
        return Tiling(**found)
    return choose_tiling(
        rows, features, weights=weights, itemsize=x.itemsize, row_major=row_major, processors=processor_count(x.device)
    )


def candidates(shape_class: tuning.ShapeClass, weights: int = 1) -> tuple[tuning.Config, ...]:
    """What `python -m tilegym_fx.tune` tries, for so many weights that share a block."""
    rows, _, _, row_major = shape_class
    share = 1 if weights == 1 else 2
    if rows == 1 and row_major:
        sizes = ((16, 512, 3), (16, 256, 4), (8, 512, 4), (8, 512, 5), (8, 1024, 2), (32, 512, 2))
        tilings = [Tiling(1, features, depth, occupancy) for features, depth, occupancy in sizes]
    elif rows <= 32:
        tile = max(16, rows)
        tilings = [Tiling(row_tile_size(rows), 64, 128, o, swap=True) for o in (1, 2, 3)]
        tilings += [Tiling(tile, features, 128, o) for features in (32, 64) for o in (2, 3, 4)]
        tilings += [Tiling(tile, features // share, 64, 3) for features in (64, 128)]
    else:
        tilings = [Tiling(64, 128 // share, 64, 2), Tiling(128, 256 // share, 64, 1, worker_warps=8)]
    return tuple(map(asdict, tilings))


CANDIDATES = {"gated_linear": partial(candidates, weights=2)}


@dataclass(frozen=True)
class Norm:
    """The RMS norm before a product: its weight, its epsilon, and how the weight is applied."""

    weight: torch.Tensor
    eps: float
    kind: int = RMS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms in a launch of its own."""
        return (rms_norm if self.kind == RMS else rms_norm_plus_one)(x, self.weight, self.eps)


def split_norm(x: torch.Tensor, norm: Norm | None, weight: torch.Tensor) -> tuple[torch.Tensor, Norm | None]:
    """Rows as a matrix; normed already unless the kernel for one row will do it."""
    x = as_matrix(x)
    if norm is not None and (x.shape[0] != 1 or not x.shape[1] or weight.stride(1) != 1):
        return norm(x), None
    return _unit_stride(x), norm


def norm_arguments(x: torch.Tensor, norm: Norm | None, *arrays: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    """What a kernel for one row takes first: x, the norm's weight, its own arrays, epsilon, kind of norm and K."""
    if norm is None:
        return (x, x, *arrays, 0.0, NO_NORM, 1)
    return (x, norm.weight, *arrays, norm.eps, norm.kind, x.shape[1])


@cache
def hinted(kernel: ct.kernel, tiling: Tiling) -> ct.kernel:
    """The kernel with the tiling's launch hints; each has compiled code of its own."""
    return kernel.replace_hints(occupancy=tiling.occupancy, num_worker_warps=tiling.worker_warps or None)


def _gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: int, norm: Norm | None = None
) -> torch.Tensor:  # fmt: skip
    lead = x.shape[:-1]
    gate, up = _unit_stride(gate), _unit_stride(up)
    x, norm = split_norm(x, norm, gate)
    if norm is None and fills_gpu_often(x.shape[0], gate.shape[0], x.itemsize):
        return project(x, up, linear(x, gate), GATE + kind).view(*lead, gate.shape[0])
    out = torch.empty((x.shape[0], gate.shape[0]), dtype=x.dtype, device=x.device)
    if not x.shape[1]:
        out.zero_()
    elif out.numel():
        tiling = best_tiling("gated_linear", x, gate, 2 * gate.shape[0], weights=2)
        run_gated(x, norm, gate, up, out, kind, tiling)
    return out.view(*lead, gate.shape[0])


def run_gated(
    x: torch.Tensor, norm: Norm | None, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor,
    kind: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill out [rows, features] = act(gate) * up, cut as `tiling` says; only one row may have a norm."""
    rows, features = out.shape
    columns, shape = -(-features // tiling.features), (tiling.features, tiling.depth)
    if tiling.rows == 1:
        args = (*norm_arguments(x, norm, gate, up, out), kind, *shape)
        return launch(hinted(gated_gemv_kernel, tiling), (columns,), args)
    grid = (-(-rows // tiling.rows) * columns,)
    launch(hinted(gated_gemm_kernel, tiling), grid, (x, gate, up, out, kind, tiling.rows, *shape, tiling.swap))


def linear_silu_mul(
    input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """silu(input Wg^T) * (input Wu^T), both products rounded before.

    Args:
        input: [..., K], any leading shape and strides, float32, float16 or bfloat16.
        gate_weight: [features, K], of the same dtype.
        up_weight: The same shape.

    Returns:
        Contiguous [..., features].
    """
    return _gated(input, gate_weight, up_weight, SILU)


def linear_gelu_tanh_mul(
    input: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """`linear_silu_mul` with gelu(gate, approximate="tanh")."""
    return _gated(input, gate_weight, up_weight, GELU_TANH)


def linear_silu_mul_packed(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear_silu_mul` with one weight: first the rows of the gate, then those of up."""
    half = weight.shape[0] // 2
    return _gated(input, weight[:half], weight[half:], SILU)


def rms_norm_linear_silu_mul(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    gate_weight: torch.Tensor, up_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear_silu_mul` of the RMS norm of `hidden_states` times `norm_weight` [K]."""
    return _gated(hidden_states, gate_weight, up_weight, SILU, Norm(norm_weight, eps))


def rms_norm_linear_silu_mul_packed(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> torch.Tensor:
    """`linear_silu_mul_packed` of the RMS norm of `hidden_states` times `norm_weight` [K]."""
    half = weight.shape[0] // 2
    return _gated(hidden_states, weight[:half], weight[half:], SILU, Norm(norm_weight, eps))


def rms_norm_plus_one_linear_gelu_tanh_mul(
    hidden_states: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    gate_weight: torch.Tensor, up_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`linear_gelu_tanh_mul` of the RMS norm of `hidden_states` times 1 + `norm_weight` [K]."""
    return _gated(hidden_states, gate_weight, up_weight, GELU_TANH, Norm(norm_weight, eps, RMS_PLUS_ONE))
