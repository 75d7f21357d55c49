"""mamba2_scan, mamba2_step, mamba2_readout: as models write them, and what comes near."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BF16, FP32, check_pass, rand

NAMES = ("mamba2_scan", "mamba2_step", "mamba2_readout")
HEADS, WIDTH, GROUPS, STATES, CHUNK = 6, 10, 2, 12, 16
check = partial(check_pass, only=NAMES, left=None)


def segments(a: Any, *, diagonal: int = -1) -> Any:
    size = a.size(-1)
    a = a[..., None].expand(*a.size(), size)
    mask = torch.tril(torch.ones(size, size, device=a.device, dtype=torch.bool), diagonal=diagonal)
    sums = torch.cumsum(a.masked_fill(~mask, 0), dim=-2)
    mask = torch.tril(torch.ones(size, size, device=a.device, dtype=torch.bool), diagonal=0)
    return sums.masked_fill(~mask, -torch.inf)


def padded(x: Any, pad: int) -> Any:
    shape = (0, 0, 0, 0, 0, pad, 0, 0) if x.dim() == 4 else (0, 0, 0, pad, 0, 0)
    return F.pad(x, shape, mode="constant", value=0)


def scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any, *,
    chunk: int = CHUNK, limits: tuple[float, float] = (0.0, math.inf), diagonal: int = -1, act: Any = F.softplus,
) -> Any:  # fmt: skip
    batch, length, heads, width = x.shape
    dt = torch.clamp(act(dt + bias), limits[0], limits[1])
    x = x.float()
    B, C = (y.float().repeat_interleave(heads // y.shape[2], dim=2, output_size=heads) for y in (B, C))
    pad = (chunk - length % chunk) % chunk
    kept = D[..., None] * padded(x, pad)
    x, A = x * dt[..., None].float(), -torch.exp(A.float()) * dt.float()
    x, A, B, C = (padded(y, pad).reshape(batch, -1, chunk, *y.shape[2:]) for y in (x, A, B, C))
    A = A.permute(0, 3, 1, 2)
    total = torch.cumsum(A, dim=-1)
    scores = torch.einsum("bclhn,bcshn->bclsh", C, B)
    scores = scores * torch.exp(segments(A, diagonal=diagonal)).permute(0, 2, 3, 4, 1)
    within = torch.einsum("bclsh,bcshp->bclhp", scores, x)
    fading = B * torch.exp(total[:, :, :, -1:] - total).permute(0, -2, -1, 1)[..., None]
    states = torch.einsum("bclhn,bclhp->bchpn", fading, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segments(F.pad(total[:, :, :, -1], (1, 0)))).transpose(1, 3)
    after = torch.einsum("bzch,bzhpn->bchpn", between, states)
    before = torch.einsum("bclhn,bchpn->bclhp", C, after[:, :-1])
    before = before * torch.exp(total).permute(0, 2, 3, 1)[..., None]
    output = (within + before).contiguous().reshape(batch, -1, heads, width) + kept
    return output[:, :length] if pad else output, after[:, -1]


def prompt(length: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    shared = (2, length, GROUPS, STATES)
    return [
        rand(2, length, HEADS, WIDTH, dtype=dtype), rand(2, length, HEADS, dtype=dtype),
        rand(HEADS, dtype=dtype, seed=2), rand(*shared, dtype=dtype),
        rand(*shared, dtype=dtype, seed=1), rand(HEADS, dtype=dtype),
        rand(HEADS, dtype=dtype, seed=1),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [7, CHUNK, 41, 3 * CHUNK], ids=["part", "chunk", "chunks and part", "chunks"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_a_prompt_of_any_length(length: int, dtype: torch.dtype) -> None:
    """The author's code takes another way in each of these cases."""
    outcome = check(scan, prompt(length, dtype), {"mamba2_scan": 1})
    inputs = outcome.chosen[0].match.inputs
    assert (inputs["chunk_size"], inputs["least"], inputs["most"]) == (CHUNK, 0.0, math.inf)


def test_limits_are_found() -> None:
    outcome = check(partial(scan, limits=(0.001, 0.1)), prompt(20), {"mamba2_scan": 1})
    assert [outcome.chosen[0].match.inputs[name] for name in ("least", "most")] == [0.001, 0.1]


def test_two_layers_share_their_masks() -> None:
    """Equal constants of several layers are one node, which stays beside the kernels."""

    def code(x: Any, dt: Any, A: Any, B: Any, *others: Any) -> Any:
        first, one = scan(x, dt, A, B, *others)
        second, two = scan(first.to(x.dtype), dt + 1, A + 1, B + 1, *(y + 1 for y in others))
        return second, one, two

    check(code, prompt(20), {"mamba2_scan": 2})


def test_near_miss_a_position_that_sees_its_own_decay() -> None:
    check(partial(scan, diagonal=0), prompt(20), {})


def test_near_miss_another_activation_of_the_step() -> None:
    check(partial(scan, act=F.relu), prompt(20), {})


def test_near_miss_padding_with_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "padded", lambda y, pad: F.pad(y, (0, 0) * (y.dim() - 2) + (0, pad), value=1.0))
    check(scan, prompt(20), {})


def test_guards_of_a_prompt() -> None:
    x, dt, A, B, C, D, bias = prompt(20)
    refused = {"mamba2_scan": "splits all three alike"}
    check(scan, [x, dt, A, B.half(), C, D, bias], {}, refused=refused)
    many = [rand(1, 20, 2, 300), rand(1, 20, 2, 300, seed=1)]
    inputs = [x[:1, :, :2], dt[:1, :, :2], A[:2], *many, D[:2], bias[:2]]
    check(scan, inputs, {}, refused={"mamba2_scan": "300 states"})


def step(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any, *, sign: float = 1.0) -> Any:
    batch = x.shape[0]
    x = x.view(batch, HEADS, WIDTH)
    dt = dt.transpose(1, 2).expand(-1, -1, WIDTH) + bias[:, None].expand(-1, WIDTH)
    dt = F.softplus(dt)[..., None]
    A = (-torch.exp(A.float()))[:, None, None].expand(-1, WIDTH, STATES)
    fading = torch.exp(dt.float() * A.float())
    B, C = (y.reshape(batch, GROUPS, 1, STATES).expand(-1, -1, HEADS // GROUPS, -1) for y in (B, C))
    entering = dt * B.reshape(batch, HEADS, 1, STATES) * x[..., None]
    after = state * fading + sign * entering
    state.copy_(after.to(state.dtype))
    rows = after.to(C.dtype).view(batch * HEADS, WIDTH, STATES)
    read = torch.bmm(rows, C.reshape(batch * HEADS, STATES, 1)).view(batch, HEADS, WIDTH)
    return (read + x * D[:, None].expand(-1, WIDTH)).to(x.dtype)


def position() -> list[torch.Tensor]:
    shared = (2, 1, GROUPS * STATES)
    return [
        rand(2, HEADS, WIDTH, STATES, dtype=FP32), rand(2, 1, HEADS * WIDTH), rand(2, 1, HEADS),
        rand(HEADS, seed=2), rand(*shared), rand(*shared, seed=1), rand(HEADS), rand(HEADS, seed=1),
    ]  # fmt: skip


def test_one_position() -> None:
    """The states are written back to the cache between the two kernels."""
    check(step, position(), {"mamba2_step": 1, "mamba2_readout": 1})


def test_near_miss_of_what_enters() -> None:
    check(partial(step, sign=-1.0), position(), {"mamba2_readout": 1})


def test_near_miss_states_rounded_before_they_are_kept() -> None:
    inputs = position()
    check(step, [inputs[0].to(BF16), *inputs[1:]], {"mamba2_step": 1, "mamba2_readout": 1})
