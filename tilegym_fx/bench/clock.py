"""Seconds of a call: by CUDA events and graphs where there is a GPU, by the host's clock elsewhere."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]


class Clock:
    """Times calls that work on one device.

    Args:
        device: Its type, ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def each(self, call: Call, repeats: int) -> list[float]:
        """Seconds between the ends of successive calls, which are issued without waiting in between."""
        if not self.on_gpu:
            return self.wall(call, repeats)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.wait()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]

    def wall(self, call: Call, repeats: int) -> list[float]:
        """Seconds on the clock of each call, with waiting for its end."""
        seconds = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            seconds.append(time.perf_counter() - start)
        return seconds

    def settle(self, call: Call, seconds: float) -> None:
        """Call it for a while: under load a GPU is fast at first, and takes its time to find its clock."""
        end = time.perf_counter() + seconds
        while self.on_gpu and time.perf_counter() < end:
            call()
            self.wait()

    def captured(self, call: Call) -> Call:
        """The call as the replay of a CUDA graph; without a GPU, itself.

        Raises:
            RuntimeError: It does something that a graph cannot hold.
        """
        if not self.on_gpu:
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def trace(self, call: Call, repeats: int, keep: Path | None = None) -> dict[str, Any]:
        """The Chrome trace of some calls.

        Args:
            call: What to run.
            repeats: How often.
            keep: Where to leave the trace as a file.
        """
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self.wait()
        with profile(activities=[activity]) as profiler:
            for _ in range(repeats):
                call()
            self.wait()
        with tempfile.TemporaryDirectory() as folder:
            file = keep or Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        return loaded

    def give_back(self) -> None:
        """Memory that is no longer held, to whoever else uses the GPU: filling a cache takes several times its size."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Start to measure the most memory in use."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most memory in use since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0
