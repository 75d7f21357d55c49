"""Decode attention on a GPU: how many blocks share the keys of a head, and how many keys they take in a step.

    python benchmarks/bench_decode_attention.py                                  # at most 300 s
    python benchmarks/bench_decode_attention.py --only llama-8b --batches 1 --json results.json
    python benchmarks/bench_decode_attention.py --dry-run                        # on a CPU: small shapes, interpreted

One query a sequence against a static cache, under the boolean mask with which transformers hides what is not filled
yet. `rule` is what the op runs; every other line is a number of blocks that share the keys of a head (`blocks`) and
the keys of one of their steps. Times are medians of graph replays on caches that are not in the L2 cache (timing.py).
Before that each tiling is compared with float32, and 50 replays of it in a graph with each other, bit by bit. Worker
processes compile everything first.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import one_by_one
import torch
from timing import argument_sets, median_time

from tilegym_fx import inventory
from tilegym_fx.launch import processor_count
from tilegym_fx.recording import recorded

KERNELS = sys.modules[inventory.load().entry_point("gqa_attention_masked").__module__]
#: Query heads, key heads, head dimension.
MODELS = {"llama-8b": (32, 8, 128), "qwen3-8b": (32, 8, 128), "gemma-3-4b": (8, 4, 256), "gemma-3-12b": (16, 8, 256)}
#: Entries of the cache beyond those that are filled.
SPARE = 64
BLOCKS = (4, 8, 16, 32, 64)
REPLAYS = 50
#: Relative error, as a norm, that rounding weights and results to bfloat16 explains.
TOLERANCE = 6e-3
#: Seconds for one compilation, and for all of them.
COMPILE_LIMIT = 40
WARM_LIMIT = 120
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One step of one layer.

    Attributes:
        name: Models of this shape.
        heads: Query heads, key heads, head dimension.
        batch: Sequences.
        filled: Keys that are seen.
    """

    name: str
    heads: tuple[int, int, int]
    batch: int
    filled: int

    def __str__(self) -> str:
        return f"{self.name} {self.batch}x{self.filled}"

    @property
    def bytes(self) -> int:
        """Keys and values that are seen."""
        return 2 * 2 * self.batch * self.heads[1] * self.filled * self.heads[2]

    def make(self, device: str) -> Arguments:
        """Fresh queries, keys, values and mask."""
        heads, key_heads, width = self.heads
        keys = self.filled + SPARE
        make = {"dtype": torch.bfloat16, "device": device}
        q = torch.empty(self.batch, 1, heads, width, **make).normal_().transpose(1, 2)
        k, v = torch.empty(2, self.batch, key_heads, keys, width, **make).normal_()
        mask = (torch.arange(keys, device=device) < self.filled).expand(self.batch, 1, 1, keys)
        return q, k, v, mask


def cases(models: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Every combination; models with equal heads are one."""
    names: dict[tuple[int, int, int], list[str]] = {}
    for model in models:
        names.setdefault(MODELS[model], []).append(model)
    for heads, same in names.items():
        for batch in batches:
            for filled in contexts:
                yield Case(" ".join(same), heads, batch, filled)


def tilings(case: Case, processors: int) -> dict[str, Any]:
    """The rule's tiling, and others by number of blocks and keys of a step."""
    pairs, keys = case.batch * case.heads[1], case.filled + SPARE
    rule = KERNELS.choose_decode_tiling(case.heads[2], 2)
    found = {"rule": rule}
    half = replace(rule, keys=rule.keys // 2, occupancy=2)
    for tiling in (replace(half, keys=half.keys // 2, occupancy=3), half, rule):
        for blocks in BLOCKS:
            if blocks * pairs <= 8 * processors and blocks * tiling.keys <= keys:
                found[f"{blocks} blocks of {tiling.keys}"] = replace(tiling, shares=blocks)
    return found


def attend(tiling: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = torch.empty(q.shape[0], 1, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
    KERNELS.run_decode(q, k, v, KERNELS._compact(mask, k.shape[2]), y, q.shape[3] ** -0.5, tiling)
    return y


def exact(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same in float32."""
    group = case.heads[0] // case.heads[1]
    k, v = (x[:, :, : case.filled].float().repeat_interleave(group, 1) for x in (k, v))
    return (torch.softmax(q.float() @ k.mT * case.heads[2] ** -0.5, -1) @ v).transpose(1, 2)


def check(case: Case, label: str, run: Callable[..., torch.Tensor], arguments: Arguments) -> float:
    """The relative error of one run.

    Raises:
        SystemExit: Rounding does not explain it.
    """
    expected = exact(case, *arguments)
    error = float((run(*arguments).float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"error: {case}, {label}: relative error {error:.2e}")
    return error


def replays_that_differ(run: Callable[..., torch.Tensor], arguments: Arguments) -> int:
    """How many replays of a graph give other bits than the first."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(*arguments)
    graph.replay()
    first, others = y.clone(), []
    for _ in range(REPLAYS):
        y.fill_(math.nan)
        graph.replay()
        others.append((y != first).any())
    return int(torch.stack(others).sum())


def measure(case: Case) -> dict[str, Any]:
    """All tilings of a case, checked and timed; prints its lines."""
    sets = argument_sets(functools.partial(case.make, "cuda"))
    runs = {
        label: functools.partial(attend, tiling)
        for label, tiling in tilings(case, processor_count(sets[0][0].device)).items()
    }
    times = {}
    for label, run in runs.items():
        error, differ = check(case, label, run, sets[0]), replays_that_differ(run, sets[0])
        if differ:
            raise SystemExit(f"error: {case}, {label}: {differ} of {REPLAYS} replays differ")
        times[label] = median_time([functools.partial(run, *arguments) for arguments in sets]).microseconds
        print(f"{case!s:34} {label:24} error {error:.1e} {times[label]:8.1f} us "
              f"{case.bytes / times[label] / 1e3:6.0f} GB/s", flush=True)  # fmt: skip
    best = min(times, key=times.__getitem__)
    print(f"{case!s:34} best {times[best]:.1f} us ({best}), rule {times['rule']:.1f} us", flush=True)
    return {"case": str(case), "bytes": case.bytes, "microseconds": times}


def run_once(wanted: Sequence[Case], part: str) -> None:
    """Run a share of all tilings, only to fill the compiler's cache on disk."""
    index, count = map(int, part.split("/"))
    processors = processor_count(torch.device("cuda", torch.cuda.current_device()))
    jobs = [(case, tiling) for case in wanted for tiling in tilings(case, processors).values()]
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case, tiling in jobs[index::count]:
            attend(tiling, *case.make("cuda"))


def dry_run(case: Case) -> None:
    """What would be launched at the case's shape, and every tiling interpreted at a small one."""
    for label, tiling in tilings(case, processor_count(torch.device("meta"))).items():
        with recorded() as launches:
            attend(tiling, *case.make("meta"))
        grids = ", ".join(f"{launch.kernel._pyfunc.__name__} {launch.grid}" for launch in launches)
        small = replace(case, batch=1, filled=200)
        run = functools.partial(attend, replace(tiling, keys=16, shares=min(tiling.shares or 4, 8)))
        torch.manual_seed(0)
        print(f"{case!s:34} {label:24} error {check(small, label, run, small.make('cpu')):.1e}  {grids}", flush=True)


def main(arguments: Sequence[str]) -> int:
    options = one_by_one.decode_options("Decode attention over numbers of blocks.", list(MODELS), arguments)
    wanted = list(cases(options.only, options.batches, options.contexts))
    return one_by_one.run(__file__, arguments, options, wanted, measure, run_once, dry_run, WARM_LIMIT)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
