"""Counters in GPU memory that are 0 whenever a launch starts that uses them, because each launch leaves them at 0.

Blocks that count themselves, so that the last one can finish the work of all, need counters that nobody else changes
meanwhile. Clearing them for each launch would be a launch of its own. So they are cleared once, and handed out so
that two launches which may run at the same time have different ones:

- to a stream, whose launches follow each other;
- to each launch that is captured into a CUDA graph. The graph may be replayed on any stream, beside anything but
  itself: CUDA lets one replay of a graph wait for the one before. These counters are never handed out again, as
  nobody tells when a graph is gone.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

#: Counters of a device: 4 MiB. A graph of 32 layers that attend to 8 key heads takes 1024.
CAPACITY = 1 << 20
#: Counters are handed out in multiples of this many, so that no two owners share a line of the cache.
_LINE = 32

_lock = threading.Lock()
_stores: dict[torch.device, _Store] = {}


def counters_for(device: torch.device, count: int) -> torch.Tensor | None:
    """Counters for a launch on the current stream of a device, all 0, which the launch has to set back to 0.

    Args:
        device: Where the launch runs; off the GPU one launch follows the other.
        count: How many.

    Returns:
        int32 [count]; None where none can be had: all are given away, or the first launch of all is being captured.
    """
    if device.type != "cuda":
        return _counters(device, count, stream=0)
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
        return _counters(device, count, None if capturing else torch.cuda.current_stream().cuda_stream)


def _counters(device: torch.device, count: int, stream: int | None) -> torch.Tensor | None:
    with _lock:
        store = _stores.get(device)
        if store is None:
            if stream is None:  # memory made now would belong to the graph
                return None
            store = _stores[device] = _Store(device)
        return store.fresh(count) if stream is None else store.of_stream(stream, count)


class _Store:
    """The counters of one device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        # In a thread of its own: what this one allocates may be going to the memory of a graph that is prepared, which
        # takes it all back.
        with ThreadPoolExecutor(1) as worker:
            self._memory = worker.submit(_zeros, device).result()
        self._given = 0
        self._of_stream: dict[int, torch.Tensor] = {}

    def of_stream(self, stream: int, count: int) -> torch.Tensor | None:
        """The counters of a stream, others than before only where it has too few."""
        known = self._of_stream.get(stream)
        if known is None or len(known) < count:
            known = self.fresh(1 << (count - 1).bit_length())
            if known is None:
                return None
            self._of_stream[stream] = known
        return known[:count]

    def fresh(self, count: int) -> torch.Tensor | None:
        """Counters that nobody has had."""
        start, end = self._given, self._given + -(-count // _LINE) * _LINE
        if end > CAPACITY:
            return None
        self._given = end
        return self._memory[start : start + count]


def _zeros(device: torch.device) -> torch.Tensor:
    memory = torch.zeros(CAPACITY, dtype=torch.int32, device=device)
    if memory.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return memory
