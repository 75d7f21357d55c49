"""Benches on one GPU: many may prepare, one alone may time, and one that waits for that is not passed over."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest

from tilegym_fx.bench.turns import Turns

SOON, LATER = 0.3, 20.0


@pytest.fixture
def gpu() -> str:
    return f"test_{uuid.uuid4().hex}"


def entered(enter: Callable[[], None]) -> threading.Event:
    """Set once the call has returned, in a thread of its own."""
    done = threading.Event()
    threading.Thread(target=lambda: (enter(), done.set()), daemon=True).start()
    return done


def test_preparing_is_shared(gpu: str) -> None:
    first, second = Turns(gpu), Turns(gpu)
    first.prepare()
    assert entered(second.prepare).wait(LATER)


def test_timing_waits_for_those_who_prepare_and_keeps_out_those_who_come_later(gpu: str) -> None:
    preparing, timing, late = Turns(gpu), Turns(gpu), Turns(gpu)
    preparing.prepare()
    measuring = entered(timing.measure)
    assert not measuring.wait(SOON)
    joined = entered(late.prepare)
    assert not joined.wait(SOON)
    preparing.leave()
    assert measuring.wait(LATER)
    assert not joined.wait(SOON)
    timing.leave()
    assert joined.wait(LATER)


def test_two_never_time_together(gpu: str) -> None:
    first, second = Turns(gpu), Turns(gpu)
    first.measure()
    waiting = entered(second.measure)
    assert not waiting.wait(SOON)
    first.leave()
    assert waiting.wait(LATER)


def test_other_gpus_and_the_cpu_do_not_wait(gpu: str) -> None:
    Turns(gpu).measure()
    assert entered(Turns(f"{gpu}_other").measure).wait(LATER)
    assert entered(Turns(None).measure).wait(LATER)
