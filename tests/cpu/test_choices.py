"""Choices are recorded, followed, and weighed against the scores of whoever follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilegym_fx.choices import Choices, UnlikeError, chooses
from tilegym_fx.export import export_module

Scores = torch.Tensor
SCORES = torch.tensor([[1.0, 5.0, 3.0, 4.0], [2.0, 2.0, -torch.inf, 0.0]])
TURNED = torch.tensor([[1.0, 3.99, 3.0, 4.0], [2.0, 2.0, -torch.inf, 0.0]])
CODE: dict[str, Callable[[Scores], tuple[Scores, Scores]]] = {
    "topk": lambda s: torch.topk(s, 1, dim=-1),
    "topk of the least": lambda s: torch.topk(s, 2, dim=0, largest=False, sorted=False),
    "sort": lambda s: torch.sort(s, dim=-1, descending=True),
    "stable sort": lambda s: torch.sort(s, stable=True, dim=-1),
    "argsort": lambda s: (s, s.argsort(-1)),
    "argmax": lambda s: (s, s.argmax(-1)),
    "argmax of all": lambda s: (s, s.argmax()),
    "argmin": lambda s: (s, s.argmin(-1, keepdim=True)),
}


def run(code: Callable[[Scores], tuple[Scores, Scores]], scores: Scores, choices: Choices) -> tuple[Scores, Scores]:
    with choices.call("call"):
        return tuple(code(scores))  # type: ignore[return-value]


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_what_was_chosen_is_chosen_again(code: Callable[[Scores], tuple[Scores, Scores]]) -> None:
    made = Choices()
    _, index = run(code, SCORES, made)
    assert torch.equal(index, code(SCORES)[1])
    follow = Choices(made.indices)
    _, followed = run(code, TURNED, follow)
    assert torch.equal(followed, index)
    assert torch.equal(follow.made["call"][0].index, index)
    assert made.made["call"][0].against == 0
    assert follow.made["call"][0].against < 3


def test_the_scores_at_another_choice_speak_against_it() -> None:
    follow = Choices({"call": [torch.tensor([[1], [1]])]})
    values, index = run(CODE["topk"], TURNED, follow)
    assert values.tolist() == [[TURNED[0, 1].item()], [2.0]]
    assert index.tolist() == [[1], [1]]
    assert follow.made["call"][0].against == pytest.approx(0.01)
    assert follow.made["call"][0].excess > 1
    assert follow.made["call"][0].largest == 4
    coarse = Choices({"call": [torch.tensor([[1], [1]])]}, dtype=torch.bfloat16)
    run(CODE["topk"], TURNED, coarse)
    assert coarse.made["call"][0].excess < 1
    excluded = Choices({"call": [torch.tensor([[1], [2]])]})
    run(CODE["topk"], TURNED, excluded)
    assert excluded.made["call"][0].against == torch.inf


def test_an_order_that_is_free_does_not_speak_against_a_choice() -> None:
    follow = Choices({"call": [torch.tensor([[3, 1], [1, 0]])]})
    run(lambda s: torch.topk(s, 2, sorted=False), SCORES, follow)
    assert follow.made["call"][0].against == 0


@pytest.mark.parametrize(
    ("followed", "why"),
    [
        ([], "no like before"),
        ([torch.zeros(2, 2, dtype=torch.long)], "no like before"),
        ([torch.full((2, 1), 4)], "not among the 4"),
        ([torch.full((2, 1), -1)], "not among the 4"),
        ([torch.zeros(2, 1, dtype=torch.long)] * 2, "chooses 1 times, 2 before"),
    ],
    ids=["none", "shape", "above", "below", "fewer"],
)
def test_what_cannot_be_followed_is_told(followed: list[Scores], why: str) -> None:
    with pytest.raises(UnlikeError, match=why):
        run(CODE["topk"], SCORES, Choices({"call": followed}))


def test_integers_are_no_scores_unless_asked_for() -> None:
    for wanted in (False, True):
        made = Choices(of_integers=wanted)
        run(CODE["sort"], torch.tensor([3, 1, 2]), made)
        assert len(made.made["call"]) == wanted


def test_a_call_that_fails_has_made_no_choices() -> None:
    def failing(scores: Scores) -> tuple[Scores, Scores]:
        torch.topk(scores, 1)
        raise RuntimeError

    made = Choices()
    with pytest.raises(RuntimeError):
        run(failing, SCORES, made)
    assert made.made == {}


class Code(torch.nn.Module):
    """Somebody's code."""

    def __init__(self, code: Callable[[Scores], tuple[Scores, Scores]]) -> None:
        super().__init__()
        self.code = code

    def forward(self, scores: Scores) -> Scores:
        return self.code(scores)[1]


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_a_graph_tells_whether_it_chooses(code: Callable[[Scores], tuple[Scores, Scores]]) -> None:
    def graph(scores: Scores) -> torch.fx.Graph:
        return export_module(Code(code), (scores,), {}).graph_module.graph

    assert chooses(graph(SCORES))
    assert not chooses(graph(SCORES.nan_to_num().long()))
    assert not chooses(export_module(Code(lambda s: (s, s.amax(-1))), (SCORES,), {}).graph_module.graph)
