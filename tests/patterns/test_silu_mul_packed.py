"""silu_mul_packed: gate and up are the halves of one value, the gate first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_checks import BATCH, LENGTH, check_pass, everywhere, rand
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

NAME = "silu_mul_packed"


def chunked(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return up * F.silu(gate)


def split(x: Any) -> Any:
    gate, up = torch.split(x, [48, 48], dim=-1)
    return F.silu(gate) * up


def sliced(x: Any) -> Any:
    return F.silu(x[..., :48]) * x[..., 48:]


def narrowed(x: Any) -> Any:
    return F.silu(x.narrow(-1, 0, 48)) * x.narrow(2, 48, 48)


@everywhere
@pytest.mark.parametrize("code", [chunked, split, sliced, narrowed])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    check_pass(code, [rand(BATCH, LENGTH, 96, dtype=dtype)], {NAME: 1}, dynamic=dynamic)


def test_the_mlp_of_transformers() -> None:
    config = Phi3Config(hidden_size=64, intermediate_size=48)
    check_pass(Phi3MLP(config).to(torch.bfloat16), [rand(2, 5, 64)], {NAME: 1, "linear": 2})


def test_near_miss_the_gate_is_the_second_half() -> None:
    def code(x: Any) -> Any:
        up, gate = x.chunk(2, dim=-1)
        return up * F.silu(gate)

    check_pass(code, [rand(5, 96)], {"silu_mul": 1}, left=2)


def test_near_miss_interleaved_halves() -> None:
    check_pass(lambda x: F.silu(x[..., ::2]) * x[..., 1::2], [rand(5, 96)], {"silu_mul": 1}, left=2)


def test_near_miss_two_of_three_parts() -> None:
    def code(x: Any) -> Any:
        gate, up, rest = x.chunk(3, dim=-1)
        return F.silu(gate) * up, rest

    check_pass(code, [rand(5, 96)], {"silu_mul": 1}, left=3)


def test_near_miss_halves_of_another_dimension() -> None:
    def code(x: Any) -> Any:
        gate, up = x.chunk(2, dim=0)
        return F.silu(gate) * up

    check_pass(code, [rand(6, 96)], {"silu_mul": 1}, left=2)


def test_a_slice_with_another_reader_stays_beside_the_kernel() -> None:
    def code(x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up, up + 1

    check_pass(code, [rand(5, 96)], {NAME: 1}, left=2)
