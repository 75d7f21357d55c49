"""Gate and up projections with the gate, y = act(n Wg^T) * (n Wu^T), in one cuTile launch.

    x [rows, K], Wg and Wu [features, K], y [rows, features]; act is SiLU or GELU (tanh form)
    n is x, or the RMS norm of x times a weight

A decode step is bound by reading the weights, so what counts is that one launch reads all that share an
input: the GPU drains and fills up once instead of two or three times, and x, the norm and the gate never
travel through memory. Products are `ct.mma` on ROWS x FEATURES x DEPTH tiles as in linear.py, summed in
float32. Gate and up are rounded as they are on their own, then multiplied as gated_activation.py does.

The norm. Its scale 1 / sqrt(mean(x^2) + eps) is one number for a row, so it commutes with the product: tiles of
x are multiplied by the norm's weight on their way in, their squares are summed beside, and the finished sums
are scaled. Nothing waits for a pass over x. What is rounded is x times weight, once, where the separate norm
rounds once or twice. float16 has not the range for that, nor is it worth while with more than NORM_ROWS rows,
which too many blocks would each norm again: then the norm is a launch of its own (norm.py).

One row is multiplied in float32 registers, [FEATURES, DEPTH] at a time, and summed over K at the end.

Overlap. The kernels let their successor start early and wait for their predecessor before they touch memory:
launched with programmatic dependent launch, a block's start is hidden behind the end of the kernel before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .gated_activation import GELU_TANH, SILU, gated
from .linear import LATENCY, MULTIPROCESSORS, _processors, _unit_stride, grouped
from .norm import rms_norm, rms_norm_plus_one

# The norm before the product: the parameter NORM of the kernels.
NO_NORM = 0
RMS = 1  # times weight
RMS_PLUS_ONE = 2  # times 1 + weight

#: Up to so many rows the norm is part of the product's kernel.
NORM_ROWS = 64
ZERO = ct.PaddingMode.ZERO
Int = ct.Constant[int]
Flag = ct.Constant[bool]


@dataclass(frozen=True)
class Tiling:
    """How a fused product is cut into blocks.

    Attributes:
        rows: Rows of x a block owns; 1 multiplies in registers, more on the matrix units.
        features: Rows of each W, columns of the result.
        depth: Step along K.
        occupancy: Blocks that should fit on one multiprocessor.
        worker_warps: Warps that compute, 0 for the compiler's choice.
        tma: Whether the loads of one row's product may use the bulk-copy engine (the others always may).
    """

    rows: int
    features: int
    depth: int
    occupancy: int
    worker_warps: int = 0
    tma: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.features, self.depth


def row_tile(x, norm_weight, row, k, squares, shape, norm, dtype):
    """Tile k of the rows as it is multiplied, and their squares with those of this tile."""
    tile = ct.load(x, (row, k), shape, padding_mode=ZERO)
    if norm == NO_NORM:
        return ct.astype(tile, dtype), squares
    wide = ct.astype(tile, ct.float32)
    factor = ct.astype(ct.load(norm_weight, (k,), (shape[1],), padding_mode=ZERO), ct.float32)
    if norm == RMS_PLUS_ONE:
        factor = factor + 1.0
    return ct.astype(wide * ct.reshape(factor, (1, shape[1])), dtype), squares + wide * wide


def row_scale(squares, hidden, eps, norm):
    """[ROWS, 1]: 1 / sqrt(mean(x^2) + eps) from the squares of whole rows; 1 without a norm."""
    if norm == NO_NORM:
        return ct.full((1, 1), 1.0, ct.float32)
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / hidden) + eps)


def weight_tile(weight, k, column, shape):
    """A tile [DEPTH, FEATURES] of W [features, K]."""
    return ct.load(weight, (k, column), shape, order=(1, 0), padding_mode=ZERO)


def weight_rows(weight, column, k, shape, tma):
    """A tile [FEATURES, DEPTH] of W [features, K] in float32."""
    return ct.astype(ct.load(weight, (column, k), shape, padding_mode=ZERO, latency=LATENCY, allow_tma=tma), ct.float32)


@ct.kernel
def gated_linear_kernel(
    x, norm_weight, gate_weight, up_weight, out, eps,
    NORM: Int, HIDDEN: Int, KIND: Int, ROWS: Int, FEATURES: Int, DEPTH: Int, TMA: Flag,
):  # fmt: skip
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    row, column = grouped(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.cdiv(out.shape[1], FEATURES))
    squares = ct.zeros((ROWS, DEPTH), ct.float32)
    if ROWS == 1:
        gates = ct.zeros((FEATURES, DEPTH), ct.float32)
        ups = ct.zeros((FEATURES, DEPTH), ct.float32)
        for k in range(ct.cdiv(x.shape[1], DEPTH)):
            left, squares = row_tile(x, norm_weight, row, k, squares, (1, DEPTH), NORM, ct.float32)
            gates = gates + weight_rows(gate_weight, column, k, (FEATURES, DEPTH), TMA) * left
            ups = ups + weight_rows(up_weight, column, k, (FEATURES, DEPTH), TMA) * left
        gate = ct.reshape(ct.sum(gates, axis=1), (1, FEATURES))
        up = ct.reshape(ct.sum(ups, axis=1), (1, FEATURES))
    else:
        gate = ct.zeros((ROWS, FEATURES), ct.float32)
        up = ct.zeros((ROWS, FEATURES), ct.float32)
        for k in range(ct.cdiv(x.shape[1], DEPTH)):
            left, squares = row_tile(x, norm_weight, row, k, squares, (ROWS, DEPTH), NORM, x.dtype)
            gate = ct.mma(left, weight_tile(gate_weight, k, column, (DEPTH, FEATURES)), gate)
            up = ct.mma(left, weight_tile(up_weight, k, column, (DEPTH, FEATURES)), up)
    scale = row_scale(squares, HIDDEN, eps, NORM)
    gate, up = ct.astype(gate * scale, out.dtype), ct.astype(up * scale, out.dtype)
    result = gated(gate, up, KIND, out.dtype == ct.float32)
    ct.store(out, (row, column), ct.astype(result, out.dtype))


@lru_cache(maxsize=4096)
def choose_tiling(
    rows: int, features: int, *, weights: int = 1, has_norm: bool = False, itemsize: int = 2,
    processors: int = MULTIPROCESSORS,
) -> Tiling:  # fmt: skip
    """The tiling for a fused product.

    Args:
        rows: Rows of x.
        features: Columns of all results together.
        weights: Products of a block, which share its registers and memory: two for gate and up.
        has_norm: Whether the kernel norms its rows.
        itemsize: Bytes of an element.
        processors: Multiprocessors of the GPU.
    """
    if itemsize == 4:  # multiply-add instructions, unrolled: larger tiles spill registers
        return Tiling(16, 64 // weights, 32, 1) if rows <= 16 else Tiling(64, 64 // weights, 16, 1)
    if rows > 64:
        return Tiling(128, 256 // weights, 64, 1, worker_warps=8)
    if rows > 16:
        return Tiling(32, 128 // weights, 64, 3) if rows <= 32 else Tiling(64, 128 // weights, 64, 2)
    if weights == 1 and features < 64 * processors:
        return Tiling(16, 32, 128, 3)
    return Tiling(16, 64 // weights, 64 if has_norm else 128, 4)


@dataclass(frozen=True)
class Norm:
    """The RMS norm before a product: its weight, its epsilon, and how the weight is applied."""

    weight: torch.Tensor
    eps: float
    kind: int = RMS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms in a launch of its own."""
        return (rms_norm if self.kind == RMS else rms_norm_plus_one)(x, self.weight, self.eps)


def split_norm(x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, Norm | None]:
    """Rows as a matrix; normed already where the kernel should not do it."""
    x = x.reshape(-1, x.shape[-1])
    rows = x.shape[0]
    if norm is not None and (rows > NORM_ROWS or (rows > 1 and x.dtype == torch.float16)):
        return norm(x), None
    return _unit_stride(x), norm


def norm_arguments(x: torch.Tensor, norm: Norm | None, *arrays: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    """What every kernel takes first: x, the norm's weight, its own arrays, epsilon, kind of norm and K."""
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
    x, norm = split_norm(x, norm)
    out = torch.empty((x.shape[0], gate.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel():
        tiling = choose_tiling(
            x.shape[0], 2 * gate.shape[0], weights=2, has_norm=norm is not None,
            itemsize=x.itemsize, processors=_processors(x.device),
        )  # fmt: skip
        run_gated(x, norm, _unit_stride(gate), _unit_stride(up), out, kind, tiling)
    return out.view(*lead, gate.shape[0])


def run_gated(
    x: torch.Tensor, norm: Norm | None, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor,
    kind: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Fill out [rows, features] = act(gate) * up, cut as `tiling` says."""
    rows, features = out.shape
    grid = (-(-rows // tiling.rows) * -(-features // tiling.features),)
    args = (*norm_arguments(x, norm, gate, up, out), kind)
    launch(hinted(gated_linear_kernel, tiling), grid, (*args, *tiling.shape, tiling.tma))


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
