"""Gated activations in cuTile: y = act(gate) * up, where act is SiLU, GELU (tanh form) or GELU (erf form).

    silu(x)      = x / (1 + exp(-x))
    gelu_tanh(x) = x / (1 + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715 x^3); equals 0.5 x (1 + tanh(u))
    gelu(x)      = max(x, 0) - |x| * Phi(-|x|), Phi the normal distribution

As in the eager code, act(gate) is rounded to the dtype of `gate` before the product. The rewritten forms
have no difference of nearly equal numbers, so they are also the more exact ones for large negative x.

The functions themselves, and how exact they are, are those of activation.py.

Tiles. Contiguous operands are one long row; otherwise rows are walked one by one, so that the halves of a
packed gate_up projection need no copy. A block takes 2048 elements: two 16-byte loads a thread from each
operand, four in flight. Full tiles are loaded without bounds checks; the last tile of a row is gathered
under a mask.

Precision of the functions. For 2-byte inputs approximate division and flushed exp2 take 5 instructions an
element where the exact forms take 17 to 30 (sm_90); memory delivers one element in about 40 issue slots.
Float32 takes exact.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

from .activation import GELU, GELU_TANH, MAX_LENGTH, SILU, TILE, activation


def gated(gate, up, kind, exact):
    """act(gate) rounded like `gate`, times up."""
    opened = ct.astype(activation(ct.astype(gate, ct.float32), kind, exact), gate.dtype)
    if gate.dtype == up.dtype:
        return opened * up
    return ct.astype(opened, ct.float32) * ct.astype(up, ct.float32)


@ct.kernel
def gated_activation_kernel(gate, up, out, KIND: ct.Constant[int], WIDTH: ct.Constant[int]):
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()
    length = out.shape[1]
    tiles = ct.cdiv(length, WIDTH)
    row, k = ct.bid(0) // tiles, ct.bid(0) % tiles
    exact = gate.dtype == ct.float32
    if (k + 1) * WIDTH <= length:
        left = ct.load(gate, (row, k), shape=(1, WIDTH), check_bounds=False, allow_tma=False)
        right = ct.load(up, (row, k), shape=(1, WIDTH), check_bounds=False, allow_tma=False)
        result = ct.astype(gated(left, right, KIND, exact), out.dtype)
        ct.store(out, (row, k), result, check_bounds=False, allow_tma=False)
    else:
        columns = k * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        result = gated(ct.gather(gate, (row, columns)), ct.gather(up, (row, columns)), KIND, exact)
        ct.scatter(out, (row, columns), ct.astype(result, out.dtype))


def pick_width(length: int) -> int:
    """Columns of a block: TILE, or for shorter rows the power of two that covers them."""
    return TILE if length >= TILE else max(16, 1 << (length - 1).bit_length())


def _gated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    dtype = gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    count = out.numel()
    if not count:
        return out
    width = gate.shape[-1]
    if gate.is_contiguous() and up.is_contiguous() and count <= MAX_LENGTH:
        shape = (1, count)
    else:
        shape = (count // width, width)
    gate, up = _as_matrix(gate, shape), _as_matrix(up, shape)
    tile = pick_width(shape[1])
    launch(gated_activation_kernel, (shape[0] * -(-shape[1] // tile),), (gate, up, out.view(shape), kind, tile))
    return out


def _as_matrix(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Views rows of equal distance as a matrix; any other strides cost a copy."""
    if tensor.dim() > 2:
        tensor = tensor.flatten(0, -2)
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate: [..., columns], any strides, float32, float16 or bfloat16.
        up: the same shape, any of these dtypes; the result has the promoted dtype and is contiguous.
    """
    return _gated(gate, up, SILU)


def silu_mul_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the columns of `gate_up` and up the second.

    Args:
        gate_up: [..., 2 * columns], any strides, float32, float16 or bfloat16.
    """
    half = gate_up.shape[-1] // 2
    return _gated(gate_up[..., :half], gate_up[..., half:], SILU)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate, approximate="tanh") * up; arguments as for `silu_mul`."""
    return _gated(gate, up, GELU_TANH)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the exact (erf) GELU; arguments as for `silu_mul`."""
    return _gated(gate, up, GELU)
