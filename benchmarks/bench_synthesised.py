"""How fast synthesised kernels are beside torch.compile's kernels for the same regions.

    python benchmarks/bench_synthesised.py [DRAFTS ...] [--limit 95] [--json FILE]

Takes draft Definitions (`python -m tilegym_fx.scan MODEL --draft DIR` writes some; by default the 30 of
docs/synthesis.md), writes a kernel for each and compares its results with the reference's, at small ragged sizes and at
those that are timed. Several processes do that, and have
torch.compile make its kernel, side by side. When all are done, one after the other times its regions while nothing
else uses the GPU, as timing.py does: medians over graph replays, on arguments that are not in the L2 cache.
Every region has its row, printed as soon as it is known: times, or what stood in their way. How many there are of each
and the geometric mean come last. Without a CUDA device the kernels are interpreted at small sizes and compiled for an
H200 as they would be at those that are timed, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._inductor as inductor
from timing import argument_sets, median_time

from tilegym_fx.closeness import error_ratio
from tilegym_fx.doctor import find_tool
from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory import Inventory, load
from tilegym_fx.inventory.sizes import CannotTryError
from tilegym_fx.kernel_check import compile_faults, difference, random_inputs
from tilegym_fx.new import scaffold
from tilegym_fx.schema import Definition
from tilegym_fx.synth import write_kernel

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent / "tests" / "support" / "regions"
#: Name of a draft -> sizes of its variable axes in the model that it is from, at a prompt of 2048 tokens.
REAL_SIZES = HERE / "synthesised_regions.json"
#: Other drafts' axes by name: a prompt of a mid-sized model.
SIZES = {
    "B": 1, "S": 2048, "N": 2048, "H": 4096, "I": 4096, "K": 4096, "M": 4096, "D": 128, "R": 64, "T": 2048, "L": 2048,
}  # fmt: skip
#: Of the time for everything; what is not prepared by then is left out.
_SHARE_FOR_TIMING = 0.25
#: Seconds for a process that has ended to say with what status.
_FOR_STATUS = 10
#: Where kernels run.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: What the kernels are compiled for where there is no GPU.
_ARCHITECTURE = "sm_90"
#: Rows of results that are compared, from the top and from the bottom.
_ROWS = 256
_ROW = "{name:<52} {ours:>10} {compiled:>10} {ratio:>8}  {note}"
#: What is printed of a region, and its outcome in a word or two.
Row = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A region whose kernel is right, and calls of both kernels on several arguments."""

    row: Row
    ours: Sequence[Callable[[], Any]]
    compiled: Sequence[Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="*", type=Path, default=[DEFAULT], help="files, or folders of them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--limit", type=float, default=95, metavar="S", help="seconds for everything (default: 95)")
    parser.add_argument("--jobs", type=int, default=min(10, os.cpu_count() or 1), metavar="N")
    options = parser.parse_args()
    files = [f for path in options.drafts for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    print(_ROW.format(name="region", ours="ours, us", compiled="compile", ratio="times", note=""), flush=True)
    rows = []
    for row in timed_together(files, min(options.jobs, len(files)), time.monotonic() + options.limit):
        rows.append(row)
        print(_ROW.format(**row), flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        header = {"device": device, "torch": torch.__version__, "regions": len(files)}
        options.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(summary(rows, len(files)), flush=True)


def summary(rows: Sequence[Row], regions: int) -> str:
    """How many regions there are a time for, what became of the others, and the geometric mean."""
    counts = Counter(row["outcome"] for row in rows)
    timed = counts.pop("timed", 0)
    others = "".join(f", {count} {outcome}" for outcome, count in sorted(counts.items()))
    ratios = [float(row["ratio"]) for row in rows if row["ratio"]]
    mean = f"{statistics.geometric_mean(ratios):.3f}x of torch.compile" if ratios else "unknown"
    return f"{timed} of {regions} regions right and timed{others}; geometric mean {mean}"


def new_row(name: str, outcome: str = "", note: str = "") -> Row:
    """A row without times; the note is cut to what fits a line."""
    return {"name": name, "ours": "", "compiled": "", "ratio": "", "outcome": outcome, "note": note[:160]}


class Worker:
    """A process with its share of the regions, and what it has told of them.

    Attributes:
        connection: Here it tells which region it begins with (a name), what became of one (a row), and that all are
            prepared (True).
        process: The process.
        left: Names of regions that have no row yet.
        at: The region that it was last at.
        is_ready: Whether it waits for its turn to time.
        has_ended: Whether nothing more will come.
    """

    def __init__(self, files: Sequence[Path], folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(files, folder, other), daemon=True)
        self.process.start()
        other.close()  # or its end would not be noticed
        self.left = [file.stem for file in files]
        self.at = ""
        self.is_ready = self.has_ended = False

    def listen(self) -> Row | None:
        """One message, which has to be there; the row, if it is one."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.has_ended, self.is_ready = True, False
            return None
        if isinstance(message, dict):
            self.left.remove(message["name"])
            return message
        self.is_ready = message is True
        self.at = self.at if self.is_ready else message
        return None

    def take_turn(self) -> None:
        """Have it time its regions."""
        self.is_ready = False
        with suppress(OSError):  # it has ended while it waited, as listening will show
            self.connection.send(True)

    def rest(self) -> Iterator[Row]:
        """Rows of what it has not come to tell of."""
        where = f"at {self.at}" if self.at else "at no region yet"
        if self.has_ended:
            self.process.join(_FOR_STATUS)
            why = "crashed", f"crash: its process ended with status {self.process.exitcode} {where}"
        else:
            why = "out of time", f"no time: its process was {where}"
        yield from (new_row(name, *why) for name in self.left)


def timed_together(files: Sequence[Path], jobs: int, until: float) -> Iterator[Row]:
    """A row for each file, as they come."""
    # The kernels' folder is there until the last worker has ended: cuTile reads a kernel's file when it is launched.
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(files[i::jobs], folder) for i in range(jobs)]
        try:
            prepared_by = until - _SHARE_FOR_TIMING * (until - time.monotonic())
            yield from rows_of(workers, prepared_by)
            ready = [worker for worker in workers if worker.is_ready]
            for worker in workers:
                if worker not in ready:
                    worker.process.kill()  # or it would use the GPU while others are timed
            for worker in ready:
                worker.take_turn()
                yield from rows_of([worker], until)
            for worker in workers:
                yield from worker.rest()
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()


def rows_of(workers: Sequence[Worker], until: float) -> Iterator[Row]:
    """Rows as they come, until every worker is ready or has ended, or it is time."""
    waiting: dict[Any, Worker] = {worker.connection: worker for worker in workers}
    while waiting and (left := until - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            worker = waiting[connection]
            if (row := worker.listen()) is not None:
                yield row
            elif worker.is_ready or worker.has_ended:
                del waiting[connection]


def work(files: Sequence[Path], folder: str, connection: Connection) -> None:
    """One process: its regions prepared, then, when it is its turn, timed."""
    torch.set_num_threads(1)
    inductor.config.compile_threads = 1  # the processes share the cores already
    prepared = []
    with connection:
        for file in files:
            connection.send(file.stem)
            made = survived(file.stem, partial(prepare, file, folder))
            if isinstance(made, Prepared):
                prepared.append(made)
            else:
                connection.send(made)
        connection.send(True)
        connection.recv()
        for region in prepared:
            connection.send(region.row["name"])
            connection.send(survived(region.row["name"], partial(timed, region)))


def survived(name: str, step: Callable[[], Row | Prepared]) -> Row | Prepared:
    """What a step gives, or a row that says what it raised: whatever that is, the other regions are none the worse."""
    try:
        return step()
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        return new_row(name, "crashed", f"crash: {type(error).__name__}: {said}")


def prepare(file: Path, folder: str) -> Row | Prepared:
    """A region ready to be timed, or why it is not."""
    record = json.loads(file.read_text(encoding="utf-8"))
    definition = Definition.model_validate(record)
    row = partial(new_row, file.stem)
    try:
        inventory = written(definition, record, folder)
        kernel, run = inventory.entry_point(definition.name), inventory.reference(definition.name)
        inputs = random_inputs(definition)
    except (TilegymFxError, CannotTryError) as error:
        return row("refused", str(error))
    if wrong := difference(run, kernel, inputs, device=DEVICE):
        return row("wrong", wrong[0])
    if DEVICE == "cpu":
        return row(*compiled_without_gpu(inventory, definition))
    arguments = large_inputs(definition)
    if not agree(run(*arguments), kernel(*arguments)):
        return row("wrong", f"differs from its reference at {sizes_of(definition)}")
    compiled = torch.compile(run, dynamic=False)
    compiled(*arguments)
    sets = argument_sets(lambda: tuple(v.clone() for v in arguments))
    return Prepared(row("timed"), [partial(kernel, *one) for one in sets], [partial(compiled, *one) for one in sets])


def timed(region: Prepared) -> Row:
    """The region's row with both times."""
    ours, theirs = median_time(region.ours).microseconds, median_time(region.compiled).microseconds
    return {**region.row, "ours": f"{ours:.2f}", "compiled": f"{theirs:.2f}", "ratio": f"{theirs / ours:.3f}"}


def compiled_without_gpu(inventory: Inventory, definition: Definition) -> tuple[str, str]:
    """Outcome and note of a region whose kernel is right: whether it compiles at the sizes that would be timed."""
    if find_tool("tileiras") is None:
        return "right", "right; not compiled: no tileiras; not timed: no CUDA device"
    faults = compile_faults(inventory, definition.name, [_ARCHITECTURE], sizes=sizes_of(definition))
    if faults:
        return "wrong", faults[0]
    return "right", f"right; compiles for {_ARCHITECTURE}; not timed: no CUDA device"


def large_inputs(definition: Definition) -> tuple[torch.Tensor, ...]:
    """Random inputs on the GPU, of the sizes that are timed."""
    sizes = {n: a.value for n, a in definition.axes.items() if a.type == "const"} | sizes_of(definition)
    torch.manual_seed(0)
    return tuple(
        random_tensor([sizes[axis] for axis in spec.shape or ()], getattr(torch, spec.dtype))
        for spec in definition.inputs.values()
    )


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda", dtype=dtype)
    return torch.randint(0, 2, shape, device="cuda").to(dtype)


def agree(wanted: Any, got: Any) -> bool:
    """Whether results are alike in their first and last rows; whole ones take a CPU too long to judge."""
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (wanted, got)), strict=True)
    return all(error_ratio(ends_of(one), ends_of(two)) <= 1 for one, two in pairs)


def ends_of(result: torch.Tensor) -> torch.Tensor:
    rows = result.reshape(-1, result.shape[-1])
    return torch.cat([rows[:_ROWS], rows[-_ROWS:]]).cpu()


def written(definition: Definition, record: Mapping[str, Any], folder: str) -> Inventory:
    """An inventory of the Definition and a kernel that is synthesised now; its files stay in the folder."""
    made = write_kernel(definition, definition.name)
    parts = scaffold.Parts(dict(record), made.kernel, made.how, made.dtypes, guards=made.guards)
    root = tempfile.mkdtemp(dir=folder)  # of its own: another process could be writing beside it
    scaffold.write(definition.name, parts, Path(root))
    return load(root, shipped=False)


def sizes_of(definition: Definition) -> dict[str, int]:
    """Sizes of the variable axes: the model's own where they are known."""
    real = {entry["name"]: entry["sizes"] for entry in json.loads(REAL_SIZES.read_text(encoding="utf-8"))}
    known = real.get(definition.name, SIZES)
    return {axis: known.get(axis, 1) for axis, spec in definition.axes.items() if spec.type == "var"}


if __name__ == "__main__":
    main()
