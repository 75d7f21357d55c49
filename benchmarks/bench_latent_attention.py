"""Latent attention in decode on a GPU: the absorbed form beside the author's order, and tilings of it.

    python benchmarks/bench_latent_attention.py                                  # at most 300 s
    python benchmarks/bench_latent_attention.py --only deepseek-v3 --batches 1 --json results.json
    python benchmarks/bench_latent_attention.py --dry-run                        # on a CPU: small shapes, interpreter

One query a sequence against a static cache of latents, under the boolean mask with which transformers hides what is
not filled yet. `torch` is the Definition's reference as it stands, `author` the same steps by our own kernels, `rule`
what the op runs; every other line is the absorbed form with so many blocks that share the tokens of a sequence, and
heads of a block. Times are medians of graph replays on caches that are not in the L2 cache (timing.py). Before that
each is compared with float32, and 50 replays of ours in a graph with each other, bit by bit. Worker processes compile
everything first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import one_by_one
import torch
from bench_decode_attention import replays_that_differ
from timing import argument_sets, median_time

from tilegym_fx import inventory
from tilegym_fx.launch import processor_count
from tilegym_fx.recording import recorded

NAME = "latent_attention_masked"
INVENTORY = inventory.load()
KERNELS = sys.modules[INVENTORY.entry_point(NAME).__module__]
#: Heads; widths of the part of a key that is not rotated, the rotated part, latents and values are those of both.
MODELS = {"deepseek-v2-lite": 16, "deepseek-v3": 128}
NOPE, TURNED, RANK, VALUES = 128, 64, 512, 128
SCALE = (NOPE + TURNED) ** -0.5
#: Entries of the cache beyond those that are filled.
SPARE = 64
SHARES = (1, 2, 4, 8, 16, 32, 64)
#: Tokens of a step.
KEYS = 64
#: Relative error, as a norm, that rounding keys, values, weights and results to bfloat16 explains.
TOLERANCE = 1e-2
#: Seconds for one compilation, and for all of them.
COMPILE_LIMIT = 40
WARM_LIMIT = 120
Arguments = tuple[torch.Tensor, ...]
Run = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One step of one layer.

    Attributes:
        name: The model.
        heads: Its heads.
        batch: Sequences.
        filled: Tokens that are seen.
    """

    name: str
    heads: int
    batch: int
    filled: int

    def __str__(self) -> str:
        return f"{self.name} {self.batch}x{self.filled}"

    @property
    def bytes(self) -> int:
        """Latents and rotated keys that are seen, and the weight."""
        cached = self.batch * self.filled * (RANK + TURNED)
        return 2 * (cached + self.heads * (NOPE + VALUES) * RANK)

    def make(self, device: str) -> Arguments:
        """Fresh queries, latents, rotated key, weight and mask."""
        tokens = self.filled + SPARE
        make = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
        q = make(self.batch, 1, self.heads, NOPE + TURNED).normal_().transpose(1, 2)
        latents, k_pe = make(self.batch, 1, tokens, RANK).normal_(), make(self.batch, 1, tokens, TURNED).normal_()
        weight = make(self.heads * (NOPE + VALUES), RANK).normal_(std=RANK**-0.5)
        mask = (torch.arange(tokens, device=device) < self.filled).expand(self.batch, 1, 1, tokens)
        return q[..., :NOPE], q[..., NOPE:], latents, k_pe, weight, mask


def cases(models: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Every combination."""
    for model in models:
        for batch in batches:
            for filled in contexts:
                yield Case(model, MODELS[model], batch, filled)


def tilings(case: Case, processors: int) -> dict[str, Any]:
    """The rule's tiling, and others by number of blocks and heads of a block."""
    rule = KERNELS.TILING
    found = {"rule": rule}
    for heads, warps in ((16, 0), (32, 0), (64, 8)) if case.heads > 32 else ((16, 0),):
        blocks = -(-case.heads // heads) * case.batch
        for shares in SHARES:
            if processors // 8 <= shares * blocks <= 4 * processors and KEYS * shares <= case.filled:
                tiling = replace(rule, rows=heads, worker_warps=warps, shares=shares)
                found[f"{shares} blocks of {heads} heads"] = tiling
    return found


def absorbed(tiling: Any, *arguments: torch.Tensor) -> torch.Tensor:
    """The op with a tiling of its own."""
    q_nope, _, latents, _, weight, _ = arguments
    y = q_nope.new_empty(q_nope.shape[0], 1, q_nope.shape[1], VALUES)
    KERNELS.run_absorbed(*arguments[:4], weight.view(q_nope.shape[1], -1, latents.shape[3]),
                         KERNELS._compact(arguments[5], latents.shape[2]), y, SCALE, tiling)  # fmt: skip
    return y


def runs_of(case: Case, processors: int) -> dict[str, Run]:
    """What is measured, by label."""
    found: dict[str, Run] = {
        "torch": functools.partial(INVENTORY.reference(NAME), scale=SCALE),
        "author": functools.partial(KERNELS.expanded_attention, scale=SCALE),
    }
    return found | {label: functools.partial(absorbed, t) for label, t in tilings(case, processors).items()}


def exact(case: Case, *arguments: torch.Tensor) -> torch.Tensor:
    """The same in float32, of the tokens that are seen."""
    q_nope, q_pe, latents, k_pe, weight, _ = (x.float() for x in arguments)
    latents, k_pe = latents[:, 0, : case.filled], k_pe[:, 0, : case.filled]
    matrices = weight.view(case.heads, -1, RANK)
    found = []
    for head in range(case.heads):  # one by one: keys of all heads would not fit
        key, value = (latents @ part.T for part in matrices[head].split([NOPE, VALUES]))
        scores = q_nope[:, head] @ key.mT + q_pe[:, head] @ k_pe.mT
        found.append(torch.softmax(SCALE * scores, -1) @ value)
    return torch.stack(found, 2)


def check(case: Case, label: str, run: Run, arguments: Arguments) -> float:
    """The relative error of one run.

    Raises:
        SystemExit: Rounding does not explain it.
    """
    expected = exact(case, *arguments)
    error = float((run(*arguments).float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"error: {case}, {label}: relative error {error:.2e}")
    return error


def measure(case: Case) -> dict[str, Any]:
    """All runs of a case, checked and timed; prints its lines."""
    sets = argument_sets(functools.partial(case.make, "cuda"))
    times = {}
    for label, run in runs_of(case, processor_count(sets[0][0].device)).items():
        error = check(case, label, run, sets[0])
        differ = label != "torch" and replays_that_differ(run, sets[0])
        if differ:
            raise SystemExit(f"error: {case}, {label}: {differ} replays differ")
        times[label] = median_time([functools.partial(run, *arguments) for arguments in sets]).microseconds
        print(f"{case!s:26} {label:24} error {error:.1e} {times[label]:8.1f} us "
              f"{case.bytes / times[label] / 1e3:6.0f} GB/s", flush=True)  # fmt: skip
    best = min(times, key=times.__getitem__)
    print(f"{case!s:26} best {times[best]:.1f} us ({best}), rule {times['rule']:.1f} us, "
          f"author {times['author']:.1f} us", flush=True)  # fmt: skip
    return {"case": str(case), "bytes": case.bytes, "microseconds": times}


def run_once(wanted: Sequence[Case], part: str) -> None:
    """Run a share of everything, only to fill the compiler's cache on disk."""
    index, count = map(int, part.split("/"))
    processors = processor_count(torch.device("cuda", torch.cuda.current_device()))
    jobs = [(case, run) for case in wanted for run in runs_of(case, processors).values()]
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case, run in jobs[index::count]:
            run(*case.make("cuda"))


def dry_run(case: Case) -> None:
    """What would be launched at the case's shape, and everything interpreted at a small one."""
    small = replace(case, heads=min(case.heads, 16), batch=1, filled=90)
    torch.manual_seed(0)
    arguments = small.make("cpu")
    for label, run in runs_of(case, processor_count(torch.device("meta"))).items():
        with recorded() as launches:
            run(*case.make("meta"))
        grids = ", ".join(f"{launch.kernel._pyfunc.__name__} {launch.grid}" for launch in launches)
        print(f"{case!s:26} {label:24} error {check(small, label, run, arguments):.1e}  {grids}", flush=True)


def main(arguments: Sequence[str]) -> int:
    options = one_by_one.decode_options(
        "Latent attention in decode, absorbed and as its author wrote it.", list(MODELS), arguments
    )
    wanted = list(cases(options.only, options.batches, options.contexts))
    return one_by_one.run(__file__, arguments, options, wanted, measure, run_once, dry_run, WARM_LIMIT)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
