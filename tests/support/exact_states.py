"""What Definitions of convolutions and states give in float64; :mod:`exact` for the others."""

from __future__ import annotations

from typing import Any

import torch
from exact import FLOOR32, ROUNDED32, Rounding, exact


@exact("causal_conv1d", "causal_conv1d_silu", "causal_conv1d_bias_silu")
def _causal_conv1d(r: Rounding, name: str, x: Any, weight: Any, bias: Any = None) -> Any:
    """The sum is rounded before SiLU, whose slope is at most 1.1."""
    taps = weight.shape[-1]

    def summed(x: Any, weight: Any, bias: Any) -> Any:
        padded = torch.nn.functional.conv1d(x, weight, bias, padding=taps - 1, groups=x.shape[1])
        return padded[..., : x.shape[-1]]

    value = summed(x, weight, bias)
    size = summed(x.abs(), weight.abs(), None if bias is None else bias.abs())
    error = r.relative * value.abs() + (taps + 2) * ROUNDED32 * size + r.step
    if "silu" in name:
        value = value * torch.sigmoid(value)
        error = 1.1 * error + r.relative * value.abs() + 16 * ROUNDED32 * size + r.step + FLOOR32
    return ((value, error),)


@exact("causal_conv1d_step", "causal_conv1d_step_silu", "causal_conv1d_step_bias_silu")
def _causal_conv1d_step(r: Rounding, name: str, window: Any, weight: Any, bias: Any = None) -> Any:
    (whole,) = _causal_conv1d(r, name, window, weight, bias)
    return (tuple(part[..., -1:] for part in whole),)


def _mamba2_steps(r: Rounding, dt: Any, bias: Any) -> tuple[Any, Any]:
    """The steps before their limits, and what rounding bias, sum and softplus, whose slope is at most 1, adds up to."""
    summed = dt + bias
    step = torch.nn.functional.softplus(summed)
    return step, r.relative * (bias.abs() + 1.01 * summed.abs() + 1.01 * step) + 4 * r.step + 16 * ROUNDED32 * step


@exact("mamba2_scan")
def _mamba2_scan(
    r: Rounding, name: str, x: Any, dt: Any, A_log: Any, B: Any, C: Any, D: Any, dt_bias: Any,
    least: float, most: float, **_: Any,
) -> Any:  # fmt: skip
    """Every earlier input faded by what has passed since; the exponent is off by what the sum of the steps is off."""
    length, heads = x.shape[1], x.shape[2]
    B, C = (y.repeat_interleave(heads // y.shape[2], 2) for y in (B, C))
    step, error = _mamba2_steps(r, dt, dt_bias)
    step, error, A = step.clamp(least, most), error + r.relative * step, -A_log.exp()
    past, off = (A * step).cumsum(1), (A.abs() * error).cumsum(1)
    off = off + (length + 8) * ROUNDED32 * past.abs().amax(1, keepdim=True)
    seen = torch.ones(length, length, dtype=torch.bool).tril()[..., None]

    def faded(rows: slice) -> tuple[Any, Any]:
        """What reaches each position of each input, and its error."""
        since = (past[:, rows, None] - past[:, None]).clamp(max=0.0)
        reach = torch.where(seen[rows], since.exp(), 0.0)
        weight = reach * step[:, None]
        wrong = reach * (torch.expm1(off[:, rows, None] + off[:, None]) * (step + error)[:, None] + error[:, None])
        return weight, wrong + 64 * ROUNDED32 * weight

    weight, wrong = faded(slice(None))
    score, size = (torch.einsum("blhn,bshn->blsh", c, b) for c, b in ((C, B), (C.abs(), B.abs())))
    read = torch.einsum("blsh,bshp->blhp", score * weight, x) + D[:, None] * x
    read_error = torch.einsum("blsh,bshp->blhp", size * wrong, x.abs()) + 4 * ROUNDED32 * (D[:, None] * x).abs()
    weight, wrong = faded(slice(length - 1, None))
    state = torch.einsum("blsh,bshn,bshp->bhpn", weight, B, x)
    state_error = torch.einsum("blsh,bshn,bshp->bhpn", wrong, B.abs(), x.abs())
    return (read, read_error + FLOOR32), (state, state_error + FLOOR32)


@exact("mamba2_step")
def _mamba2_step(r: Rounding, name: str, state: Any, x: Any, dt: Any, A_log: Any, B: Any, dt_bias: Any) -> Any:
    step, error = (y.transpose(1, 2)[..., None] for y in _mamba2_steps(r, dt, dt_bias))
    A = -A_log.exp()
    B = B.repeat_interleave(x.shape[1] // B.shape[1], 1)[:, :, None]
    fading = (step * A[:, None, None]).exp()
    wrong = fading * torch.expm1(A.abs()[:, None, None] * error + 8 * ROUNDED32 * (1 + step * A.abs()[:, None, None]))
    entering, size = step * B * x[..., None], B.abs() * x[..., None].abs()
    rounded = 2.01 * r.relative * entering.abs() + r.step * (2 + x[..., None].abs())
    value = state * fading + entering
    tolerance = wrong * state.abs() + error * size + rounded + 4 * ROUNDED32 * (value.abs() + entering.abs())
    return ((value, tolerance + FLOOR32),)


@exact("mamba2_readout")
def _mamba2_readout(r: Rounding, name: str, state: Any, x: Any, C: Any, D: Any) -> Any:
    """The states, what is read of them, the input's share and the sum are rounded."""
    C = C.repeat_interleave(x.shape[1] // C.shape[1], 1)[:, :, None]
    read, size, share = (state * C).sum(-1), (state * C).abs().sum(-1), x * D[:, None]
    value = read + share
    rounded = r.relative * (1.02 * size + read.abs() + share.abs() + value.abs())
    return ((value, rounded + 2 * state.shape[-1] * ROUNDED32 * size + r.step * (3 + C.abs().sum(-1))),)


@exact("gated_rms_norm", "gated_rms_norm_fp32")
def _gated_rms_norm(r: Rounding, name: str, hidden_states: Any, gate: Any, weight: Any, eps: float, groups: int) -> Any:
    opened = (hidden_states * gate * torch.sigmoid(gate)).unflatten(-1, (groups, -1))
    value = (opened * (opened.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    roundings = 1 if "fp32" in name else 2
    return ((value, (roundings * r.relative + 32 * ROUNDED32) * value.abs() + r.step * (1 + weight.abs()) + FLOOR32),)


@exact("delta_decay")
def _delta_decay(r: Rounding, name: str, a: Any, A_log: Any, dt_bias: Any) -> Any:
    """In float32: the sum is rounded, and softplus has a slope of at most 1."""
    summed, rate = a + dt_bias, A_log.exp()
    value = -rate * torch.nn.functional.softplus(summed)
    return ((value, 16 * ROUNDED32 * (value.abs() + rate * summed.abs()) + FLOOR32),)


@exact("gated_delta_step")
def _gated_delta_step(
    r: Rounding, name: str, q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, eps: float
) -> Any:
    """All in float32: what is added up in each sum tells how far rounding can lead."""
    shared, width = v.shape[2] // k.shape[2], k.shape[-1]

    def unit(rows: Any) -> Any:
        rows = rows.repeat_interleave(shared, 2)[:, 0]
        return (rows * (rows.square().sum(-1, keepdim=True) + eps).rsqrt())[..., None]

    def stepped(q: Any, k: Any, v: Any, beta: Any, state: Any, sign: int) -> tuple[Any, Any]:
        faded = state * decay[:, 0, :, None, None].exp()
        change = (v[:, 0] - sign * (faded * k).sum(-2)) * beta[:, 0, :, None]
        after = faded + k * change[:, :, None]
        return (after * q).sum(-2) / width**0.5, after

    q, k = unit(q), unit(k)
    values = stepped(q, k, v, beta, state, 1)
    sizes = stepped(q.abs(), k.abs(), v.abs(), beta.abs(), state.abs(), -1)
    lost = (3 * width + 32) * ROUNDED32 * (1 + decay[:, 0].abs())
    return tuple(
        (value, lost.reshape(*lost.shape, *(1,) * (size.dim() - 2)) * size + FLOOR32)
        for value, size in zip(values, sizes, strict=True)
    )
