"""rotary_embedding_complex: neighbouring columns are a complex number, turned by a phase in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from pass_checks import (
    BATCH,
    BF16,
    INVENTORY,
    LENGTH,
    assert_same_numbers,
    capture,
    check_pass,
    counts,
    everywhere,
    rand,
)

from tilegym_fx.cost import get_device
from tilegym_fx.pipeline import find
from tilegym_fx.plan import Policy
from tilegym_fx.results import Site
from tilegym_fx.rewrite import rewrite

NAME = "rotary_embedding_complex"


def inputs_of(batch: int, length: int, dtype: torch.dtype = BF16, *, heads_first: bool = True) -> list[torch.Tensor]:
    """Queries, keys and angles; keys have one head."""
    q, k, *_ = blocks.rotary_inputs(batch, length, dtype)
    angles = torch.arange(length)[:, None] / 10 ** torch.linspace(0, 4, 8)
    heads = [q, k[:, :1]] if heads_first else [q.transpose(1, 2), k[:, :1].transpose(1, 2)]
    return [*heads, angles.expand(batch, -1, -1).contiguous()]


def turn(x: Any, phases: Any) -> Any:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * phases).flatten(3).type_as(x)


def heads_first(q: Any, k: Any, angles: Any) -> Any:
    phases = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return turn(q, phases), turn(k, phases)


def positions_first(q: Any, k: Any, angles: Any) -> Any:
    phases = torch.polar(torch.ones_like(angles), angles)[:, :, None, :]
    return turn(q, phases), turn(k, phases)


@everywhere
@pytest.mark.parametrize("code", [heads_first, positions_first])
def test_hit(code: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    inputs = inputs_of(BATCH, LENGTH, dtype, heads_first=code is heads_first)
    check_pass(code, inputs, {NAME: 1}, left=None, dynamic=dynamic)


def projected(x: Any, weight: Any, angles: Any) -> Any:
    """Queries and keys as a linear layer gives them, transposed and cut out."""
    q, k = F.linear(x, weight).view(2, 5, 3, 16).transpose(1, 2).split((2, 1), dim=1)
    return heads_first(q, k, angles)


def copied(x: Any, weight: Any, angles: Any) -> Any:
    q, k = F.linear(x, weight).view(2, 5, 3, 16).transpose(1, 2).contiguous().split((2, 1), dim=1)
    return heads_first(q, k, angles)


@pytest.mark.parametrize(("code", "expected"), [(projected, 1), (copied, 0)])
def test_in_a_graph_that_is_to_run(code: Callable[..., Any], expected: int) -> None:
    """Where a copy upstream gives numbers their strides, it is pinned, and nothing is replaced across it."""
    inputs = [rand(2, 5, 24), rand(48, 24), inputs_of(2, 5)[2]]
    graph_module = capture(code, inputs)
    policy = Policy(get_device("h200"), [NAME])
    outcome = find(graph_module.graph, INVENTORY, policy, lambda node: Site(), keep_layouts=True)
    assert counts(outcome) == ({NAME: 1} if expected else {})
    rewrite(graph_module.graph, outcome.plan)
    graph_module.recompile()
    assert_same_numbers(graph_module, code, inputs)


def other_way(q: Any, k: Any, angles: Any) -> Any:
    phases = torch.polar(torch.ones_like(angles), angles).unsqueeze(1).conj()
    return turn(q, phases), turn(k, phases)


def a_phase_for_each(q: Any, k: Any, angles: Any) -> Any:
    phases = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return turn(q, phases), turn(k, phases * 2)


def not_rounded(q: Any, k: Any, angles: Any) -> Any:
    phases = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return turn(q.float(), phases), turn(k.float(), phases)


def test_near_miss_other_phases_for_keys() -> None:
    check_pass(a_phase_for_each, inputs_of(2, 5), {}, left=None, only=[NAME])


def test_results_in_float32_are_a_place_whose_inputs_are_float32() -> None:
    check_pass(not_rounded, inputs_of(2, 5), {NAME: 1}, left=None, only=[NAME])


def test_near_miss_halves_as_numbers() -> None:
    def one(x: Any, phases: Any) -> Any:
        pairs = torch.complex(*x.float().chunk(2, -1)) * phases
        return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)

    def code(q: Any, k: Any, angles: Any) -> Any:
        phases = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return one(q, phases), one(k, phases)

    check_pass(code, inputs_of(2, 5), {}, left=None, only=[NAME])


def test_guard_on_phases_that_do_not_fit() -> None:
    q, k, angles = inputs_of(2, 5)
    refused = {NAME: "not a row for each position"}
    check_pass(heads_first, [q, k, angles[:, :1]], {}, left=None, refused=refused, only=[NAME])


def test_guard_on_keys_at_other_positions() -> None:
    """One key for all positions is turned by the phase of each."""
    q, k, angles = inputs_of(2, 5, heads_first=False)
    check_pass(positions_first, [q, k[:, :1], angles], {}, left=None, refused={NAME: "but k is"}, only=[NAME])


def test_guard_on_double_precision() -> None:
    q, k, angles = inputs_of(2, 5)
    refused = {NAME: "complex128"}
    check_pass(heads_first, [q, k, angles.double()], {}, left=None, refused=refused, only=[NAME])


def test_the_other_direction_is_other_phases() -> None:
    check_pass(other_way, inputs_of(2, 5), {NAME: 1}, left=None, only=[NAME])
