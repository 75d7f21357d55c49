"""The update of a full sliding window on a GPU, beside the author's code and what inductor makes of it.

    python benchmarks/bench_cache_roll.py                                    # at most 60 s
    python benchmarks/bench_cache_roll.py --only phi-3-mini --json results.json
    python benchmarks/bench_cache_roll.py --dry-run                          # on a CPU: small shapes, interpreted

`rule` is what the op runs in place; every other line of ours is a strip in bytes and the tokens of a tile. `author` is
transformers' code, `inductor` the same through torch.compile. Times are medians of graph replays on caches that are not
in the L2 cache (timing.py); GB/s counts each byte of the cache read once and written once. Before it is timed each is
compared with the author's, bit by bit, over several steps in one graph, which replays them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import one_by_one
import torch
from timing import argument_sets, median_time

from tilegym_fx import inventory
from tilegym_fx.recording import recorded

KERNELS = sys.modules[inventory.load().entry_point("cache_roll_write").__module__]
#: Strips in bytes and tokens of a tile: as many bytes in a tile as the rule has, half and twice as many.
TILES = [(strip, size // strip) for strip in (32, 64, 128) for size in (8192, 16384, 32768)]
STEPS = 20
#: Seconds for one compilation, and for all of them.
COMPILE_LIMIT = 40
WARM_LIMIT = 60
Arguments = tuple[torch.Tensor, ...]
Run = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """The cache of one layer."""

    name: str
    heads: int
    held: int
    width: int
    batch: int = 1

    def make(self, device: str) -> Arguments:
        """New keys and values, and those of the cache."""
        make = {"dtype": torch.bfloat16, "device": device}
        k, v = torch.empty(2, self.batch, 1, self.heads, self.width, **make).normal_()
        cache = (torch.empty(self.batch, self.heads, self.held, self.width, **make).normal_() for _ in range(2))
        return k.transpose(1, 2), v.transpose(1, 2), *cache

    def __str__(self) -> str:
        return f"{self.name} [{self.batch}, {self.heads}, {self.held}, {self.width}]"

    @property
    def bytes(self) -> int:
        return 8 * self.batch * self.heads * self.held * self.width


CASES = (
    Case("phi-3-mini", 32, 2047, 96), Case("gemma-3-4b", 4, 1024, 256), Case("mistral-7b", 8, 4096, 128),
    Case("phi-3-mini", 32, 2047, 96, 8), Case("gemma-3-4b", 4, 1024, 256, 8),
)  # fmt: skip


def author(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    last = torch.full((1,), -1, device=keys.device)
    for cache, new in ((keys, k), (values, v)):
        rolled = cache.roll(-1, dims=-2)
        rolled[:, :, last] = new
        cache.copy_(rolled)


def tiled(tile: Any, *arguments: torch.Tensor) -> None:
    KERNELS.run_cache_roll_write(KERNELS.cache_roll_write_in_place_kernel, arguments, tile)


def tilings(case: Case) -> dict[str, Run]:
    """The rule's tiles and others that fit."""
    found: dict[str, Run] = {"rule": KERNELS.cache_roll_write_}
    for strip, tokens in TILES:
        if case.width % (strip // 2) == 0 and tokens < case.held:
            found[f"{strip} bytes, {tokens} tokens"] = functools.partial(tiled, KERNELS.Tile(tokens, strip // 2, True))
    return found


def replayed(run: Run, arguments: Arguments) -> Callable[[], None]:
    """So many steps, in a graph where there is a GPU."""

    def steps() -> None:
        for _ in range(STEPS):
            run(*arguments)

    if not arguments[0].is_cuda:
        return steps
    run(*(x.clone() for x in arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    return graph.replay


def check(case: Case, label: str, run: Run, arguments: Arguments) -> None:
    """Steps that move a cache on give the author's bits.

    Raises:
        SystemExit: They do not.
    """
    ours, theirs = (tuple(x.clone() for x in arguments) for _ in range(2))
    moves = replayed(run, ours)
    for step in range(3):
        moves()
        for _ in range(STEPS):
            author(*theirs)
        if not all(map(torch.equal, ours, theirs)):
            raise SystemExit(f"error: {case}, {label}: other bits than the author's in replay {step}")


def measure(case: Case) -> dict[str, Any]:
    """All tilings of a case, checked and timed; prints its lines."""
    sets = argument_sets(functools.partial(case.make, "cuda"))
    inductor = torch.compile(author, dynamic=False)
    times = {}
    for label, run in {**tilings(case), "author": author, "inductor": inductor}.items():
        check(case, label, run, sets[0])
        times[label] = median_time([functools.partial(run, *arguments) for arguments in sets]).microseconds
        rate = case.bytes / times[label] / 1e3
        print(f"{case!s:32} {label:24} {times[label]:8.1f} us {rate:6.0f} GB/s", flush=True)
    return {"case": str(case), "bytes": case.bytes, "microseconds": times}


def run_once(wanted: Sequence[Case], part: str) -> None:
    """Run a share of all tilings, only to fill the compiler's cache on disk."""
    index, count = map(int, part.split("/"))
    jobs = [(case, run) for case in wanted for run in tilings(case).values()]
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case, run in jobs[index::count]:
            run(*case.make("cuda"))


def dry_run(case: Case) -> None:
    """What would be launched at the case's shape, and every tiling interpreted at a small one."""
    for label, run in tilings(case).items():
        with recorded() as launches:
            run(*case.make("meta"))
        small = replace(case, batch=1, heads=1, held=min(case.held, 1100))
        if label in tilings(small):
            check(small, label, run, small.make("cpu"))
        print(f"{case!s:32} {label:24} {launches[0].kernel._pyfunc.__name__} {launches[0].grid}", flush=True)


def main(arguments: Sequence[str]) -> int:
    names = dict.fromkeys(case.name for case in CASES)
    parser = one_by_one.parser("The update of a full sliding window.")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="MODEL")
    options = parser.parse_args(arguments)
    wanted = [case for case in CASES if case.name in options.only]
    return one_by_one.run(__file__, arguments, options, wanted, measure, run_once, dry_run, WARM_LIMIT)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
