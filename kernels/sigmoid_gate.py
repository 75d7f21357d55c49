"""A value times the sigmoid of a gate, in cuTile: y = x * sigmoid(g), the sigmoid rounded like g.

The gate has the shape of x, or one number for each row. Rows are walked one by one, so that strided halves of a
projection need no copy; contiguous operands of one shape are one long row. A block takes 2048 elements. For 2-byte
inputs division is approximate and exp2 flushes; float32 takes the exact forms.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .activation import MAX_LENGTH, divide, exp
from .gated_activation import _as_matrix, pick_width


def gated(x, gate):
    exact = gate.dtype == ct.float32
    wide = ct.astype(gate, ct.float32)
    opened = ct.astype(divide(1.0, 1.0 + exp(-wide, exact), exact), gate.dtype)
    return ct.astype(x, ct.float32) * ct.astype(opened, ct.float32)


@ct.kernel
def sigmoid_gate_kernel(x, gate, out, ONE: ct.Constant[bool], WIDTH: ct.Constant[int]):
    tiles = ct.cdiv(out.shape[1], WIDTH)
    row, k = ct.bid(0) // tiles, ct.bid(0) % tiles
    columns = k * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
    factor = ct.gather(gate, (row, columns * 0 if ONE else columns))
    ct.scatter(out, (row, columns), ct.astype(gated(ct.gather(x, (row, columns)), factor), out.dtype))


def sigmoid_mul(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """hidden_states * sigmoid(gate).

    Args:
        hidden_states: [..., columns], any strides, float32, float16 or bfloat16.
        gate: the same shape, or [..., 1]; any of these dtypes. The result has the promoted dtype and is contiguous.
    """
    dtype = torch.promote_types(hidden_states.dtype, gate.dtype)
    out = torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    count, width = out.numel(), hidden_states.shape[-1]
    if not count:
        return out
    one = gate.shape[-1] != width
    flat = not one and hidden_states.is_contiguous() and gate.is_contiguous() and count <= MAX_LENGTH
    shape = (1, count) if flat else (count // width, width)
    x, factor = _as_matrix(hidden_states, shape), _as_matrix(gate, (shape[0], 1) if one else shape)
    tile = pick_width(shape[1])
    launch(sigmoid_gate_kernel, (shape[0] * -(-shape[1] // tile),), (x, factor, out.view(shape), one, tile))
    return out
