"""Coverage and throughput of a model of transformers as the benchmark measures them on a GPU."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilegym_fx.bench.cases import parse_cases
from tilegym_fx.bench.job import Job
from tilegym_fx.bench.profile import kernels_in
from tilegym_fx.bench.results import Result, Samples, from_json
from tilegym_fx.bench.run import Limits, Message, run
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory import Inventory, shipped_root
from tilegym_fx.kernel_source import cut_out

from .figures import TRUSTED, Figures

VARIANT = "eager+fx"
#: Tokens of the prompt, and entries of the cache in decode: the first that a model has positions for.
_LENGTHS = (2048, 512, 128)
#: What two processes that do the same may differ by, however steady each is: the stored reports of one model on H200s
#: (`benchmarks/2026-11-30_h200`, eager variants, one step) are up to 0.75% apart.
_BETWEEN_PROCESSES = 0.01
#: How often figures are measured that stay too noisy.
_ATTEMPTS = 3


class BenchError(TilegymFxError):
    """The benchmark gave no figures."""

    advice = "Run `python -m tilegym_fx.bench MODEL` by hand"


@dataclass(frozen=True)
class Bench:
    """What is measured.

    Attributes:
        model: A name that the benchmark takes.
        layers: Number of layers, if not the model's own.
        root: Inventory whose kernels are used besides the shipped ones.
        folder: Where the original's logits are kept, by which every experiment is judged.
        limit: Seconds for each process.
        positions: How many the model has, if its table of positions ends.
        device: ``cpu`` for a tiny model of the same type, whose figures mean nothing.
        dtype: Of the model's weights.
        until: When, on the clock of ``time.monotonic``, noisy figures may still be measured again; never by default.
    """

    model: str
    layers: int | None
    root: Path
    folder: Path
    limit: float
    positions: int | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    until: float = 0.0

    @property
    def cases(self) -> tuple[str, ...]:
        """The bench's cases whose figures count."""
        length = next((n for n in _LENGTHS if self.positions is None or n < self.positions), _LENGTHS[-1])
        cases = parse_cases([f"prefill:1x{length}", f"decode:1@{length}"])
        return tuple(str(case.small() if self.device == "cpu" else case) for case in cases)

    def figures(self, kernels: Collection[str] = ()) -> Figures:
        """Measure it; again where it is too noisy and there is time, and then the least noisy figures count.

        Args:
            kernels: Kernel functions that are under test: they have to run.

        Raises:
            BenchError: The benchmark fails, a result is wrong, or the kernels do not run.
        """
        found: list[Figures] = []
        for _ in range(_ATTEMPTS):
            started = time.monotonic()
            found.append(self._measured(kernels))
            took = time.monotonic() - started
            if found[-1].noise <= TRUSTED or time.monotonic() + 2 * took > self.until:
                break
            print(f"autokernelize: measuring again, noise was {found[-1].noise:.1%}", file=sys.stderr, flush=True)
        return min(found, key=lambda figures: figures.noise)

    def _measured(self, kernels: Collection[str]) -> Figures:
        results = self._results()
        failed = [f"{r.case}: {r.error}" for r in results if r.error]
        if failed or not results:
            raise BenchError(f"the benchmark of {self.model} gives no figures: {(failed or ['nothing ran'])[0]}")
        untimed = [r.case for r in results if not _samples(r).are_times]
        if untimed:
            raise BenchError(f"the benchmark of {self.model} gives no figures: {untimed[0]}: a clock that stands still")
        if kernels and not any(_runs(result, kernels) for result in results):
            raise BenchError(
                f"none of {', '.join(sorted(kernels))} runs in the model",
                advice="`scan --explain` tells why a Match cannot be written into the source",
            )
        return figures_of(results)

    def _results(self) -> list[Result]:
        """Of our variant, one for each case; the original is only run where it has not been."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ours = self._job(VARIANT)
        messages: list[Message] = []

        def sink(message: Message) -> None:
            messages.append(message)
            if message["kind"] == "result":
                print(f"autokernelize: {message['case']} {message['variant']}", file=sys.stderr, flush=True)

        jobs = [ours] if self._is_known() else [replace(self._job("eager"), timed=False), ours]
        run(jobs, sink, Limits(self.limit))
        found = [from_json(m) for m in messages if m["kind"] == "result"]
        return [result for result in found if result.variant == VARIANT or result.error]

    def _is_known(self) -> bool:
        """Whether the original's logits are there for every case; the benchmark's workers name the files."""
        return all((self.folder / f"{case}.pt".replace(":", "-")).is_file() for case in self.cases)

    def _job(self, variant: str) -> Job:
        is_extra = self.root.resolve() != shipped_root().resolve() and (self.root / "definitions").is_dir()
        return Job(
            self.model, variant, self.cases, str(self.folder), device=self.device, dtype=self.dtype,
            layers=self.layers, tiny=self.device == "cpu", graphed=True,
            inventory=(str(self.root),) if is_extra else (),
        )  # fmt: skip


def figures_of(results: Sequence[Result]) -> Figures:
    """The figures of results without errors; where no graph was captured the host's time is in them, as a note says."""
    times = [(result.parsed.tokens_per_call, _samples(result)) for result in results]
    # a geometric mean is off by the mean of what its members are off by, or by less if these differ in sign
    error = statistics.mean(samples.uncertainty for _, samples in times)
    return Figures(
        statistics.mean(r.coverage or 0.0 for r in results),
        statistics.geometric_mean(tokens / samples.median for tokens, samples in times),  # no case outweighs the others
        math.hypot(error, _BETWEEN_PROCESSES),
        measured=True,
        note="; ".join(f"{r.case}: {r.note}" for r in results if r.note),
    )


def _samples(result: Result) -> Samples:
    found = result.gpu or result.wall
    assert found is not None  # a result without an error has been timed
    return found


def kernels_of(inventory: Inventory, name: str) -> frozenset[str]:
    """Names of the kernel functions that the Solutions of a Definition launch, as far as their own files tell."""
    names: set[str] = set()
    for solution in inventory.solutions_for(name):
        text, entry = inventory.source_texts(solution.name)[solution.entry_file], solution.entry_function
        names |= kernels_in(cut_out(text, entry, entry, name))
    return frozenset(names)


def _runs(result: Result, kernels: Collection[str]) -> bool:
    """Whether a profile has any of these kernels; cuTile appends to their names."""
    seen: Sequence[str] = [kernel.name for kernel in result.kernels if kernel.is_ours]
    return any(name == kernel or name.startswith(f"{kernel}_K") for name in seen for kernel in kernels)
