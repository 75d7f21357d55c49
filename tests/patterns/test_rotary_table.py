"""rotary_table and its kin: cosines and sines of positions times frequencies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import check_pass, rand

check = partial(
    check_pass, only=("rotary_table", "rotary_table_fp32", "rotary_table_half_width", "rotary_table_scaled")
)

POSITIONS = torch.arange(21).view(3, 7)


def by_broadcast(x: Any, frequencies: Any, *, half: bool = False, scale: float = 1.0) -> Any:
    angles = x[:, :, None].float() * frequencies
    angles = angles if half else torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


CASES = {
    "rotary_table": ({}, torch.bfloat16),
    "rotary_table_fp32": ({}, torch.float32),
    "rotary_table_scaled": ({"scale": 1.25}, torch.bfloat16),
    "rotary_table_half_width": ({"scale": 1.25, "half": True}, torch.bfloat16),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_hit(name: str, dynamic: bool) -> None:
    options, dtype = CASES[name]

    def code(x: Any, frequencies: Any) -> Any:
        return tuple(value.to(dtype) for value in by_broadcast(x, frequencies, **options))

    check(code, [POSITIONS, rand(16, dtype=torch.float32).abs()], {name: 1}, left=1, dynamic=dynamic)


def test_near_miss_cosine_and_sine_of_different_angles() -> None:
    def code(x: Any, frequencies: Any) -> Any:
        cos, _ = by_broadcast(x, frequencies)
        _, sin = by_broadcast(x + 1, frequencies)
        return cos, sin

    check(code, [POSITIONS, rand(16, dtype=torch.float32)], {}, left=None)


def test_near_miss_the_two_halves_differ() -> None:
    def code(x: Any, frequencies: Any) -> Any:
        angles = x[:, :, None].float() * frequencies
        angles = torch.cat((angles, -angles), dim=-1)
        return angles.cos(), angles.sin()

    check(code, [POSITIONS, rand(16, dtype=torch.float32)], {}, left=None)


def test_guard_on_positions_that_are_no_integers() -> None:
    def code(x: Any, frequencies: Any) -> Any:
        return by_broadcast(x, frequencies)

    inputs = [POSITIONS.to(torch.bfloat16), rand(16, dtype=torch.float32)]
    check(code, inputs, {}, left=None, refused={"rotary_table_fp32": "positions are torch.bfloat16"})
