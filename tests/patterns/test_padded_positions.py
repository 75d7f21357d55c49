"""padded_positions: positions counted over the ids that are no padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pass_checks import BATCH, LENGTH, check_pass

NAME = "padded_positions"
check = partial(check_pass, only=(NAME,))
IDS = torch.randint(0, 4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def positions(ids: Any, *, padding: int = 1, past: int = 0, offset: int | None = None, dim: int = 1) -> Any:
    is_token = ids.ne(padding).int()
    counted = (torch.cumsum(is_token, dim=dim).type_as(is_token) + past) * is_token
    return counted.long() + (padding if offset is None else offset)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("padding", "past"), [(1, 0), (3, 0), (0, 0), (1, 512)])
def test_hit_with_its_numbers(padding: int, past: int, dynamic: bool) -> None:
    code = partial(positions, padding=padding, past=past)
    if padding == 0:  # adding nothing leaves no trace: no number stands where the pattern reads it
        check(code, [IDS], {}, left=None)
        return
    outcome = check(code, [IDS], {NAME: 1}, dynamic=dynamic)
    assert outcome.chosen[0].match.inputs["padding_idx"] == padding
    assert outcome.chosen[0].match.inputs["past"] == past


def test_near_miss_counted_from_elsewhere() -> None:
    check(partial(positions, offset=2), [IDS], {}, left=None)


def test_near_miss_counted_along_the_batch() -> None:
    check(partial(positions, dim=0), [IDS], {}, left=None)


def test_near_miss_padding_counts_on() -> None:
    def code(ids: Any) -> Any:
        is_token = ids.ne(1).int()
        return torch.cumsum(is_token, dim=1).type_as(is_token).long() + 1

    check(code, [IDS], {}, left=None)


def test_guard_ids_of_three_dimensions() -> None:
    code = partial(positions, dim=-1)
    check(code, [IDS[None]], {}, left=None, refused={NAME: "3 dimensions, not 2"})
