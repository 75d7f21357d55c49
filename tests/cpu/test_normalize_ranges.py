"""Guards against indices that there cannot be go from the normal form; those that may be needed stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_checks import assert_same_numbers, capture, rand

from tilegym_fx.normalize import normalize

LOGITS, ROWS = rand(6, 8), rand(12, 4, seed=1)
GUARDS = {"masked_fill", "clamp", "clamp_", "ge"}


def guards(code: Callable[..., Any], *inputs: torch.Tensor) -> set[str]:
    """Which of them are left, having checked that the graph computes what it did."""
    graph_module = capture(code, inputs)
    normalize(graph_module.graph)
    graph_module.recompile()
    assert_same_numbers(graph_module, code, inputs)
    names = {str(n.target).removeprefix("aten.").partition(".")[0] for n in graph_module.graph.nodes}
    return names & GUARDS


def chosen(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts in order and the order, as transformers has them."""
    return torch.sort(torch.topk(logits, 2, dim=-1)[1].reshape(-1))


def of_other_processes(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    ids, order = chosen(logits)
    counts = torch.histc(ids.float(), 8, 0, 7)
    missing = (ids >= 8).unsqueeze(-1)
    ids.clamp_(max=7)
    return rows[order].masked_fill(missing, 0.0) * counts[ids].unsqueeze(-1)


def test_what_guards_against_experts_of_other_processes_goes() -> None:
    assert guards(of_other_processes, LOGITS, ROWS) == set()


@pytest.mark.parametrize(
    "guarded",
    [
        lambda ids, rows: (2 * rows).masked_fill((ids >= 8).view(-1, 1), 0.0) + 1,
        lambda ids, rows: (2 * rows).masked_fill((ids >= 9)[:, None].expand(12, 4), 0.0) + 1,
        lambda ids, rows: rows * ids.clamp(max=7)[:, None],
        lambda ids, rows: rows * ids.clamp(max=100)[:, None],
    ],
)
def test_each_of_them_goes(guarded: Callable[..., Any]) -> None:
    assert guards(lambda logits, rows: guarded(chosen(logits)[0], rows), LOGITS, ROWS) == set()


@pytest.mark.parametrize(
    "guarded",
    [
        lambda ids, rows: (2 * rows).masked_fill((ids >= 7).view(-1, 1), 0.0),  # an index that there is
        lambda ids, rows: (2 * rows).masked_fill((ids + 1 >= 8).view(-1, 1), 0.0),
        lambda ids, rows: (2 * rows).masked_fill((ids * 2 >= 8).view(-1, 1), 0.0),
        lambda ids, rows: rows * ids.clamp(max=6)[:, None],
        lambda ids, rows: rows * ids.clamp(min=1, max=7)[:, None],
        lambda ids, rows: rows[:1].masked_fill((ids >= 8).view(-1, 1), 0.0) + rows,  # it makes twelve rows of one
    ],
)
def test_a_guard_that_may_be_needed_stays(guarded: Callable[..., Any]) -> None:
    assert guards(lambda logits, rows: guarded(chosen(logits)[0], rows), LOGITS, ROWS)


def test_indices_from_elsewhere_keep_their_guards() -> None:
    ids = torch.randint(0, 9, (12,))
    assert guards(lambda ids, rows: (2 * rows).masked_fill((ids >= 8).view(-1, 1), 0.0), ids, ROWS)
    assert guards(lambda ids, rows: rows * ids.clamp(max=7)[:, None], ids, ROWS)


def test_the_values_of_a_topk_are_no_indices() -> None:
    numbers = torch.randint(0, 99, (6, 8))

    def code(numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (2 * rows).masked_fill((torch.topk(numbers, 2)[0].reshape(-1) >= 8).view(-1, 1), 0.0)

    assert guards(code, numbers, ROWS)


def test_indices_that_are_written_over_keep_their_guards() -> None:
    def code(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ids = chosen(logits)[0]
        view = ids[:6]
        view.add_(5)
        return (2 * rows).masked_fill((ids >= 8).view(-1, 1), 0.0)

    assert guards(code, LOGITS, ROWS)


def test_the_only_index_of_a_single_number_keeps_its_guard() -> None:
    """It has no dimensions whose size would tell a bound."""
    assert guards(lambda number: torch.topk(number, 1)[1].clamp(max=0), LOGITS[0, 0])


def test_guarded_values_that_the_caller_gets_stay_apart() -> None:
    graph_module = capture(lambda logits: ((ids := chosen(logits)[0]).clamp(max=7), ids.clamp(max=8)), (LOGITS,))
    normalize(graph_module.graph)
    graph_module.recompile()
    one, other = graph_module(LOGITS)
    one.fill_(-1)
    assert (other >= 0).all()
