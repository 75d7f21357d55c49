"""Timing of kernels: medians over graph replays, with arguments that are not in the cache.

What is measured is GPU time. The calls are captured into one CUDA graph, so Python and launch overhead drop
out (`host_time` measures those by themselves), and every call of the graph works on another set of arguments:
by the time a set comes round again, the others have pushed it out of the L2 cache.

    calls = [functools.partial(op, *arguments) for arguments in argument_sets(make_arguments)]
    print(median_time(calls).microseconds, copy_rate() / 1e9)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch

#: A graph of fewer calls would be dominated by the launch of the graph itself.
MIN_CALLS_PER_GRAPH = 24
#: Sets beyond this number are not made: a set of a few kilobytes is hot in a real decode step as well.
MAX_SETS = 64
_ROUNDS = 25


@dataclass(frozen=True)
class Timing:
    """Seconds of GPU time per call: the median over the rounds, and the fastest and slowest tenth of them."""

    median: float
    low: float
    high: float

    @property
    def microseconds(self) -> float:
        """The median in microseconds."""
        return self.median * 1e6

    @property
    def spread(self) -> float:
        """Distance between the slow and the fast tenth, as a share of the median."""
        return (self.high - self.low) / self.median


def l2_bytes() -> int:
    """Size of the second-level cache of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def argument_sets(
    make: Callable[[], tuple[torch.Tensor | float, ...]], *, cache_factor: float = 3.0
) -> list[tuple[torch.Tensor | float, ...]]:
    """Calls `make` until the sets are `cache_factor` times the L2 cache (at least 2, at most MAX_SETS).

    Args:
        make: returns one tuple of arguments in fresh memory, filled with random values.
        cache_factor: how far the sets have to exceed the cache.
    """
    first = make()
    size = sum(value.nbytes for value in first if isinstance(value, torch.Tensor))
    count = int(cache_factor * l2_bytes() / max(size, 1)) + 1
    return [first, *(make() for _ in range(min(max(count, 2), MAX_SETS) - 1))]


def median_time(calls: Sequence[Callable[[], object]], *, rounds: int = _ROUNDS, graph: bool = True) -> Timing:
    """GPU time of one call, from replays of a CUDA graph that holds all `calls` in turn.

    Args:
        calls: the same work on different arguments; repeated in order until the graph is long enough.
        rounds: how many replays are timed.
        graph: capture into a CUDA graph; without it the calls are issued one by one, and host time may show.

    Raises:
        ValueError: `calls` is empty.
    """
    if not calls:
        raise ValueError("median_time needs at least one call")
    sequence = list(islice(cycle(calls), max(len(calls), MIN_CALLS_PER_GRAPH)))
    for call in calls:  # compile and tune outside of the measured region
        call()
    replay = _captured(sequence) if graph else _issued(sequence)
    for _ in range(3):
        replay()
    per_call = sorted(seconds / len(sequence) for seconds in _event_times(replay, rounds))
    tenth = len(per_call) // 10
    return Timing(statistics.median(per_call), per_call[tenth], per_call[-1 - tenth])


def host_time(call: Callable[[], object], *, repeats: int = 300) -> float:
    """Seconds of host time to issue `call` once, the median of five loops that do not wait for the GPU."""
    loops = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        loops.append((time.perf_counter() - start) / repeats)
    torch.cuda.synchronize()
    return statistics.median(loops[1:])


def copy_rate(size: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of a large copy: the ceiling of memory-bound kernels.

    Not inside a graph: an H200 copied 2770 GB/s there, and 4250 GB/s when asked directly.
    """
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / median_time([lambda: target.copy_(source)], rounds=11, graph=False).median


def _captured(sequence: Sequence[Callable[[], object]]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in sequence[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in sequence:
            call()
    return captured.replay


def _issued(sequence: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def replay() -> None:
        for call in sequence:
            call()

    return replay


def _event_times(replay: Callable[[], None], rounds: int) -> Iterator[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    for start, end in events:
        yield start.elapsed_time(end) / 1e3
