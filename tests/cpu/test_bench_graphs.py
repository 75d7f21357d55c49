"""bench: a prompt inside a CUDA graph where a job asks for it, and how far the median of its replays may be off."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils

from tilegym_fx.bench.clock import Clock
from tilegym_fx.bench.job import Job
from tilegym_fx.bench.results import Samples
from tilegym_fx.bench.worker import Worker

PROMPT = "prefill:1x6"


def job(tmp_path: Path, variant: str = "eager", *, graphed: bool = True) -> Job:
    return Job(
        "llama", variant, (PROMPT,), str(tmp_path), device="cpu", dtype="float32", tiny=True, repeats=3, graphed=graphed
    )


def result(of: Job) -> dict[str, Any]:
    """What the worker says last."""
    sent: list[dict[str, Any]] = []
    Worker(of, sent.append, lambda: None).run()
    return sent[-1]


def test_the_uncertainty_of_a_median_is_less_than_the_spread_but_sees_what_lasts() -> None:
    alternating = Samples((1.0, 1.1) * 32)
    drifting = Samples(tuple(1.0 + 0.1 * n / 63 for n in range(64)))
    one_bad_moment = Samples((*[1.3] * 8, *[1.0] * 56))
    assert alternating.spread == pytest.approx(0.1 / 1.05)
    assert alternating.uncertainty == 0.0
    assert drifting.uncertainty == pytest.approx(0.1 * 40 / 63 / 2 / 1.05)  # from the second eighth to the seventh
    assert one_bad_moment.spread == pytest.approx(0.3)
    assert one_bad_moment.uncertainty == 0.0
    assert Samples((*[1.3] * 16, *[1.0] * 48)).uncertainty == pytest.approx(0.15)
    assert Samples((1.0,) * 7).uncertainty == math.inf


def test_the_uncertainty_is_about_what_medians_of_the_same_differ_by() -> None:
    """The medians of two runs of the same are farther apart than the larger uncertainty in a twentieth of cases."""
    draw = random.Random(0)
    runs = [Samples(tuple(1.0 + 0.02 * draw.gauss(0.0, 1.0) for _ in range(64))) for _ in range(4000)]
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    slower = sum(b.median - a.median > max(a.uncertainty, b.uncertainty) for a, b in pairs) / len(pairs)
    assert 0.02 < slower < 0.08


@pytest.mark.parametrize(("graphed", "captured"), [(False, []), (True, ["Prefill"])])
def test_a_prompt_is_timed_inside_a_graph_where_the_job_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphed: bool, captured: list[str]
) -> None:
    seen: list[str] = []

    def capture(self: Clock, call: Any) -> Any:
        seen.append(type(call).__name__)
        return lambda: time.sleep(0.5)

    monkeypatch.setattr(Clock, "captured", capture)
    found = result(job(tmp_path, graphed=graphed))
    assert seen == captured
    assert (found["gpu_ms"] > 500) is graphed
    assert found["wall_ms"] < 500
    assert found["note"] == ""


def test_a_prompt_inside_a_graph_has_no_mask_where_it_has_none_when_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers builds it in a capture, as in any trace, and attention would run other kernels."""
    masks: list[torch.Tensor | None] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    def capture(self: Clock, call: Any) -> Any:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            during.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
            call()
        return call

    monkeypatch.setattr(Clock, "captured", capture)
    assert result(job(tmp_path))["error"] is None
    assert masks
    assert set(masks) == {None}


def test_a_compiled_prompt_inside_a_graph_is_as_it_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(Clock, "captured", lambda self, call: (seen.append(dict(vars(masking_utils))), call)[1])
    result(job(tmp_path, graphed=False))
    result(job(tmp_path, "compile"))
    assert [one["is_tracing"] for one in seen] == [masking_utils.is_tracing]


def test_what_preparing_held_is_given_back_before_others_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is ready, a worker waits, and others want the memory meanwhile."""
    events: list[str] = []
    monkeypatch.setattr(Clock, "give_back", lambda self: events.append("given back"))
    Worker(job(tmp_path), lambda message: events.append(message["kind"]), lambda: None).run()
    assert events == ["about", "given back", "given back", "ready", "result"]


def test_a_gpu_is_under_load_for_a_while_before_its_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(Clock, "wait", lambda self: None)
    calls: dict[str, list[None]] = {"cuda": [], "cpu": []}
    for device, made in calls.items():
        Clock(device).settle(lambda made=made: made.append(None), 5.0)
    assert {device: len(made) for device, made in calls.items()} == {"cuda": 4, "cpu": 0}


def test_a_prompt_that_no_graph_holds_is_timed_as_ever_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Clock, call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Clock, "captured", refuse)
    found = result(job(tmp_path))
    assert found["gpu_ms"] > 0
    assert found["note"].startswith("a prompt cannot be captured into a CUDA graph: RuntimeError: operation not")
