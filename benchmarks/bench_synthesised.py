"""How fast synthesised kernels are beside torch.compile's kernels for the same regions.

    python benchmarks/bench_synthesised.py [DRAFTS ...] [--limit 95] [--json FILE]

Takes draft Definitions (`python -m tilegym_fx.scan MODEL --draft DIR` writes some; by default the 30 of
docs/synthesis.md), writes a kernel for each and compares its results with the reference's, at small ragged sizes and at
those that are timed. Several processes do that, and have
torch.compile make its kernel, side by side. When all are done, one after the other times its regions while nothing
else uses the GPU, as timing.py does: medians over graph replays, on arguments that are not in the L2 cache.
A row is printed as soon as it is known, the geometric mean last. Without a CUDA device the kernels are interpreted at
small sizes, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor as inductor
import torch.multiprocessing as multiprocessing
from timing import argument_sets, median_time

from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory import load
from tilegym_fx.inventory.sizes import CannotTryError
from tilegym_fx.kernel_check import difference, error_ratio, random_inputs
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
#: Rows of results that are compared, from the top and from the bottom.
_ROWS = 256
_ROW = "{name:<52} {ours:>10} {compiled:>10} {ratio:>8}  {note}"
Row = dict[str, Any]


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
    """How many regions there are a time for, and the geometric mean."""
    ratios = [float(row["ratio"]) for row in rows if row["ratio"]]
    mean = f"{statistics.geometric_mean(ratios):.3f}x of torch.compile" if ratios else "unknown"
    return f"{len(ratios)} of {regions} regions right and timed; geometric mean {mean}"


def timed_together(files: Sequence[Path], jobs: int, until: float) -> Iterator[Row]:
    """Rows of all files as they come; none of those for which there was no time."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    turns = [context.Event() for _ in range(jobs)]
    workers = [
        context.Process(target=work, args=(i, files[i::jobs], answers, turns[i]), daemon=True) for i in range(jobs)
    ]
    for worker in workers:
        worker.start()
    try:
        ready: list[int] = []
        prepared_by = until - _SHARE_FOR_TIMING * (until - time.monotonic())
        while any(worker.is_alive() for i, worker in enumerate(workers) if i not in ready):
            if (message := next_answer(answers, prepared_by)) is None and time.monotonic() >= prepared_by:
                break
            if isinstance(message, dict):
                yield message
            elif message is not None:
                ready.append(message)
        for i, worker in enumerate(workers):
            if i not in ready:
                worker.kill()  # or it would use the GPU while others are timed
        for number in ready:
            turns[number].set()
            while (message := next_answer(answers, until)) != number:
                if isinstance(message, dict):
                    yield message
                elif message is None and (time.monotonic() >= until or not workers[number].is_alive()):
                    break
    finally:
        for worker in workers:
            worker.kill()


def next_answer(answers: Any, until: float) -> Any:
    """What some worker says within a second: a row, or its number when it is ready or done; else None."""
    try:
        return answers.get(timeout=max(0.0, min(1.0, until - time.monotonic())))
    except queue.Empty:
        return None


def work(number: int, files: Sequence[Path], answers: Any, turn: Any) -> None:
    """One process: its regions prepared, then, when it is its turn, timed."""
    torch.set_num_threads(1)
    inductor.config.compile_threads = 1  # the processes share the cores already
    prepared = []
    for file in files:
        row, pair = prepare(file)
        if pair is None:
            answers.put(row)
        else:
            prepared.append((row, pair))
    answers.put(number)
    turn.wait()
    for row, (ours, theirs) in prepared:
        seconds = median_time(ours).microseconds, median_time(theirs).microseconds
        ratio = f"{seconds[1] / seconds[0]:.3f}"
        answers.put({**row, "ours": f"{seconds[0]:.2f}", "compiled": f"{seconds[1]:.2f}", "ratio": ratio})
    answers.put(number)


def prepare(file: Path) -> tuple[Row, tuple[list[Callable[[], Any]], list[Callable[[], Any]]] | None]:
    """A row without times, and calls of both kernels on several arguments; None where ours is not right."""
    record = json.loads(file.read_text(encoding="utf-8"))
    row = {"name": record["name"], "ours": "", "compiled": "", "ratio": "", "note": ""}
    definition = Definition.model_validate(record)
    try:
        kernel, run = written(definition, record)
        inputs = random_inputs(definition)
    except (TilegymFxError, CannotTryError) as error:
        return {**row, "note": str(error)[:160]}, None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = difference(run, kernel, inputs, device=device)
    if wrong or device == "cpu":
        return {**row, "note": wrong[0][:160] if wrong else "right; not timed: no CUDA device"}, None
    arguments = large_inputs(definition)
    if not agree(run(*arguments), kernel(*arguments)):
        return {**row, "note": f"differs from its reference at {sizes_of(definition)}"}, None
    compiled = torch.compile(run, dynamic=False)
    compiled(*arguments)
    sets = argument_sets(lambda: tuple(v.clone() for v in arguments))
    return row, ([partial(kernel, *one) for one in sets], [partial(compiled, *one) for one in sets])


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


def written(definition: Definition, record: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The entry point of a kernel that is synthesised now, and the reference."""
    made = write_kernel(definition, definition.name)
    parts = scaffold.Parts(dict(record), made.kernel, made.how, made.dtypes, guards=made.guards)
    with tempfile.TemporaryDirectory() as folder:
        scaffold.write(definition.name, parts, Path(folder))
        inventory = load(folder, shipped=False)
        return inventory.entry_point(definition.name), inventory.reference(definition.name)


def sizes_of(definition: Definition) -> dict[str, int]:
    """Sizes of the variable axes: the model's own where they are known."""
    real = {entry["name"]: entry["sizes"] for entry in json.loads(REAL_SIZES.read_text(encoding="utf-8"))}
    known = real.get(definition.name, SIZES)
    return {axis: known.get(axis, 1) for axis, spec in definition.axes.items() if spec.type == "var"}


if __name__ == "__main__":
    main()
