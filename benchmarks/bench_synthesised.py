"""How fast synthesised kernels are beside torch.compile's kernels for the same regions.

    python benchmarks/bench_synthesised.py [DRAFTS ...] [--json FILE]

Takes draft Definitions (`python -m tilegym_fx.scan MODEL --draft DIR` writes some; by default those of the
tests), writes a kernel for each, compares its results with the reference and times both, as timing.py does:
medians over graph replays, on arguments that are not in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import argument_sets, median_time

from tilegym_fx.errors import TilegymFxError
from tilegym_fx.inventory import load
from tilegym_fx.kernel_check import difference, random_inputs
from tilegym_fx.new import scaffold
from tilegym_fx.schema import Definition
from tilegym_fx.synth import write_kernel

#: Variable axes by name: a prompt of a mid-sized model.
SIZES = {
    "B": 1,
    "S": 2048,
    "N": 2048,
    "H": 4096,
    "I": 4096,
    "K": 4096,
    "M": 4096,
    "D": 128,
    "R": 64,
    "T": 2048,
    "L": 2048,
}
DEFAULT = Path(__file__).resolve().parents[1] / "tests" / "support" / "drafts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="*", type=Path, default=[DEFAULT], help="files, or folders of them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    files = [f for path in options.drafts for f in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    rows = []
    for file in files:
        rows.append(timed(file))
        print("{name:<52} {ours:>10} {compiled:>10} {ratio:>8}  {note}".format(**rows[-1]), flush=True)
    ratios = [float(row["ratio"]) for row in rows if row["ratio"]]
    mean = statistics.geometric_mean(ratios)
    print(f"{len(ratios)} of {len(rows)} timed; geometric mean {mean:.3f}x of torch.compile")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def timed(file: Path) -> dict[str, Any]:
    """Microseconds of both kernels, or why there are none."""
    record = json.loads(file.read_text(encoding="utf-8"))
    row = {"name": record["name"], "ours": "", "compiled": "", "ratio": "", "note": ""}
    definition = Definition.model_validate(record)
    sizes = {axis: SIZES.get(axis, 1) for axis, spec in definition.axes.items() if spec.type == "var"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            written = write_kernel(definition, definition.name)
        except TilegymFxError as error:
            return {**row, "note": error.what}
        parts = scaffold.Parts(record, written.kernel, written.how, written.dtypes, guards=written.guards)
        scaffold.write(definition.name, parts, Path(folder))
        inventory = load(folder, shipped=False)
        kernel, run = inventory.entry_point(definition.name), inventory.reference(definition.name)
    wrong = difference(
        lambda **kw: on("cpu", run(**on("cuda", kw))), kernel, random_inputs(definition, sizes), device="cuda"
    )
    if wrong:
        return {**row, "note": wrong[0]}
    compiled = torch.compile(run, dynamic=False)
    sets = argument_sets(lambda: tuple(on("cuda", random_inputs(definition, sizes)).values()))
    ours = median_time([partial(kernel, *one) for one in sets]).microseconds
    theirs = median_time([partial(compiled, *one) for one in sets]).microseconds
    return {**row, "ours": f"{ours:.2f}", "compiled": f"{theirs:.2f}", "ratio": f"{theirs / ours:.3f}"}


def on(device: str, values: Any) -> Any:
    """Tensors of a mapping, a tuple or by themselves, moved."""
    if isinstance(values, Mapping):
        return {k: on(device, v) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(on(device, v) for v in values)
    return values.to(device) if isinstance(values, torch.Tensor) else values


if __name__ == "__main__":
    main()
