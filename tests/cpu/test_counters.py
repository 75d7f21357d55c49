"""Counters that launches leave at 0: who gets which."""

from __future__ import annotations

import pytest
import torch

from tilegym_fx import counters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_stores", {})
    monkeypatch.setattr(counters, "CAPACITY", 256)


def given(count: int, stream: int | None) -> torch.Tensor:
    found = counters._counters(CPU, count, stream)
    assert found is not None
    return found


def test_a_stream_keeps_its_counters() -> None:
    first, second = given(8, stream=7), given(8, stream=7)
    assert first.data_ptr() == second.data_ptr()
    assert first.dtype == torch.int32
    assert first.tolist() == [0] * 8


def test_no_other_stream_and_no_other_captured_launch_gets_them() -> None:
    taken = [given(40, stream) for stream in (0, 1, None, None)]
    ranges = [range(t.storage_offset(), t.storage_offset() + len(t)) for t in taken]
    assert len(set().union(*ranges)) == 4 * 40


def test_a_stream_that_needs_more_gets_others() -> None:
    few, many = given(8, stream=0), given(100, stream=0)
    assert (len(few), len(many)) == (8, 100)
    assert given(9, stream=0).data_ptr() == many.data_ptr()


def test_where_all_are_given_away_there_are_none() -> None:
    kept = given(8, stream=0)
    assert [counters._counters(CPU, 64, None) is None for _ in range(4)] == [False, False, False, True]
    assert counters._counters(CPU, 300, stream=1) is None
    assert given(8, stream=0).data_ptr() == kept.data_ptr()


def test_a_capture_before_any_launch_gets_none() -> None:
    assert counters._counters(CPU, 8, stream=None) is None
    assert counters.counters_for(CPU, 8) is not None
    assert len(given(8, stream=None)) == 8


@pytest.mark.gpu
def test_on_a_gpu_a_capture_gets_its_own_and_memory_that_is_no_graphs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    eager = counters.counters_for(device, 8)
    assert eager is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = counters.counters_for(device, 8)
    assert captured is not None
    assert captured.data_ptr() != eager.data_ptr()
    assert captured.untyped_storage().data_ptr() == eager.untyped_storage().data_ptr()
