"""Which sequences a float32 run judges, and what that says of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilegym_fx.bench import worker
from tilegym_fx.bench.job import Job
from tilegym_fx.bench.judge import judged_sequences, verdict
from tilegym_fx.bench.models import random_tokens

EXACT = torch.linspace(-4, 4, 6 * 32).view(6, 32)
#: The original of a model that chooses: off by 1 in one sequence that is judged.
CHOSEN = EXACT + torch.tensor([0, 1.0, 0, 0, 0, 0])[:, None]
BF16 = torch.bfloat16


def off(row: int, by: float) -> torch.Tensor:
    changed = EXACT.clone()
    changed[row, 3] += by
    return changed


def test_a_long_prompt_is_judged_by_fewer_sequences_or_none() -> None:
    assert [judged_sequences(32, n) for n in (1, 512, 2048, 16384, 16385)] == [32, 32, 8, 1, 0]


@pytest.mark.parametrize("length", [1, 5, 2048])
def test_the_tokens_of_fewer_sequences_are_the_first_of_more(length: int) -> None:
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(vocab_size=128256)
    for count in (1, 3, 8):
        assert torch.equal(random_tokens(model, count, length), random_tokens(model, 32, length)[:count])


def test_without_a_float32_run_the_original_judges() -> None:
    for wide in (None, EXACT[:0]):
        found = verdict(EXACT, off(5, 0.2), wide, BF16)
        assert found.failed is None
        assert str(found).endswith("(the original)")
        assert verdict(EXACT, off(5, 0.5), wide, BF16).failed is not None


@pytest.mark.parametrize("row", range(6))
def test_every_sequence_is_looked_at_however_many_were_judged(row: int) -> None:
    for count in (1, 4, 6):
        assert verdict(EXACT, off(row, 0.2), EXACT[:count], BF16).failed is None
        assert verdict(EXACT, off(row, 0.5), EXACT[:count], BF16).failed is not None
    nan = off(row, float("nan"))
    assert verdict(EXACT, nan, EXACT[:4], BF16).failed is not None


@pytest.mark.parametrize("row", range(6))
def test_what_a_turned_choice_moves_in_one_sequence_it_may_move_in_another(row: int) -> None:
    moved = CHOSEN + (off(row, 1.9) - EXACT)
    assert (verdict(CHOSEN, moved, EXACT[:2], BF16).failed is None) == (row != 1)  # 2.9 off, where 2 are allowed
    assert verdict(CHOSEN, CHOSEN + (off(row, 3.5) - EXACT), EXACT[:2], BF16).failed is not None
    # without a sequence that shows it, the others have to be near
    assert verdict(CHOSEN, CHOSEN + (off(row, 1.9) - EXACT), EXACT[:1], BF16).failed is not None


def test_it_says_how_many_were_judged() -> None:
    assert str(verdict(EXACT, EXACT, EXACT, BF16)).endswith("(float32 run)")
    assert str(verdict(EXACT, EXACT, EXACT[:2], BF16)).endswith("(float32 run of 2 of 6 sequences)")


def test_a_float32_run_that_runs_out_of_memory_judges_fewer_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, made_by = [], worker.Worker._call

    def of_few(self: Any, model: Any, forward: Any, case: Any) -> Any:
        made.append(case.batch)
        if len(made) > 1 and case.batch > 2:
            raise torch.OutOfMemoryError("out of memory")
        return made_by(self, model, forward, case)

    def said(variant: str, case: str) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []
        job = Job("llama", variant, (case,), str(tmp_path), device="cpu", dtype="float32", tiny=True, repeats=3)
        worker.Worker(job, sent.append, lambda: None).run()
        return sent[-1]

    monkeypatch.setattr(worker.Worker, "_call", of_few)
    for case in ("prefill:6x5", "decode:6@5"):
        made.clear()
        said("eager", case)
        assert made == [6, 6, 3, 1]  # the original, then the float32 run
        made.clear()
        assert said("compile", case)["verdict"].endswith("(float32 run of 1 of 6 sequences)")
