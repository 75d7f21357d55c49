"""Times the norm, activation and rotary kernels beside torch eager, and torch.compile of their references.

    python benchmarks/bench_norm_activation_rope.py                                # at most 70 s
    python benchmarks/bench_norm_activation_rope.py --ops rms_norm,silu_mul --compile --variants --seconds 300
    python benchmarks/bench_norm_activation_rope.py --compile --peers       # beside Liger and TileGym too

Every case is checked against the reference in float32 before it is timed. Times are medians over replays of
a CUDA graph, on arguments that are not in the L2 cache (timing.py); GB/s counts each input read once and
each output written once. A line is printed as soon as it is known. The first seconds go to compiling
everything in parallel processes, into the compilers' caches on disk.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import cuda.tile as ct
import torch
from peers import REFUSALS, peers_of
from timing import argument_sets, copy_rate, host_time, median_time
from warming import warm

from tilegym_fx import inventory

INVENTORY = inventory.load()
#: Seconds that compiling may take: of one kernel, and of everything.
COMPILE_LIMIT = 20
WARM_LIMIT = 45
EPS = 1e-6
#: Relative error beside the reference in float32, of results that are rounded to bfloat16.
ALLOWED = 6e-3
BF16 = torch.bfloat16

Arguments = tuple[Any, ...]
Patch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One op at one shape: how to make its arguments, and which tile choices to try besides the default."""

    op: str
    label: str
    make: Callable[[], Arguments]
    variants: tuple[tuple[str, Patch], ...] = ()


@dataclass
class Row:
    """What was measured for one case; times in microseconds of GPU time."""

    op: str
    label: str
    ours: float
    eager: float
    compiled: float
    gigabytes_per_second: float
    share_of_copy: float
    host: float
    variants: dict[str, float] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def ahead(self) -> float:
        """How many times faster than the better of the others that were measured."""
        others = (self.eager, self.compiled, *self.peers.values())
        return min(time for time in others if not math.isnan(time)) / self.ours


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


# Shapes: Llama-8B (4096), Llama-70B (8192), gemma-3-4b (2560), gpt-oss (2880), falcon-7b (4544), gpt2 (768),
# and the query norm of Qwen3-8B, whose heads lie inside a packed projection.
def norm_arguments(op: str, rows: int, hidden: int) -> Arguments:
    x, weight = normal(rows, hidden), normal(hidden)
    residual = (normal(rows, hidden),) if "add" in op else ()
    return (x, *residual, weight, *((normal(hidden),) if "layer" in op else ()), EPS)


def head_arguments(tokens: int, heads: int, dim: int) -> Arguments:
    packed = normal(1, tokens, (heads + 16) * dim)
    return packed[..., : heads * dim].view(1, tokens, heads, dim), normal(dim), EPS


def tile(outer: int, inner: int, chunk: int) -> Patch:
    def pick(rows: int, heads: int, *_: int) -> tuple[int, int, int, bool]:
        return outer, inner, chunk, rows % outer == 0 and heads % inner == 0

    return {"pick_tiles": pick}


def occupied(blocks: int) -> Patch:
    return {"occupancy": blocks}


ROW_VARIANTS = (
    *((f"chunk {c}", tile(1, 1, c)) for c in (2048, 4096)),
    *((f"occupancy {n}", occupied(n)) for n in (4, 8, 16)),
    ("2 rows", tile(2, 1, 1024)),
)  # fmt: skip
HEAD_VARIANTS = tuple((f"{rows} rows", tile(1, rows, 128)) for rows in (4, 8, 32))
SHORT_VARIANTS = tuple((f"{rows} rows of {c}", tile(rows, 1, c)) for c in (256, 1024) for rows in (1, 2, 4, 8, 16))


def norm_cases(op: str) -> Iterator[Case]:
    shapes = [(1, 4096), (32, 8192), (2048, 4096), (16384, 4096), (4096, 8192), (8192, 2560), (8192, 2880)]
    if "layer" in op:
        shapes = [(1, 4544), (32, 4544), (2048, 4544), (16384, 4544), (16384, 768), (8192, 6144)]
    for rows, hidden in shapes:
        tried = ROW_VARIANTS if (rows, hidden) in ((16384, 4096), (4096, 8192), (32, 8192)) else ()
        tried = SHORT_VARIANTS if hidden == 768 else tried
        yield Case(op, f"{rows} x {hidden}", partial(norm_arguments, op, rows, hidden), tried)
    if op == "rms_norm":
        for tokens in (1, 2048, 16384):
            label = f"{tokens} x 32 heads x 128 (in qkv)"
            yield Case(op, label, partial(head_arguments, tokens, 32, 128), HEAD_VARIANTS if tokens > 1 else ())


def gate_arguments(op: str, rows: int, columns: int) -> Arguments:
    return (normal(rows, 2 * columns),) if "packed" in op else (normal(rows, columns), normal(rows, columns))


GATE_VARIANTS = (
    *((f"tile {n}", {"TILE": n}) for n in (1024, 4096)),
    *((f"occupancy {n}", occupied(n)) for n in (4, 8, 16)),
)  # fmt: skip


def gate_cases(op: str) -> Iterator[Case]:
    shapes = [(1, 14336), (32, 14336), (2048, 14336), (8192, 14336), (2048, 28672), (8192, 8192)]
    if "gelu" in op:
        shapes = [(1, 10240), (32, 14336), (2048, 10240), (8192, 14336), (2048, 21504), (8192, 6912)]
    for rows, columns in shapes:
        tried = GATE_VARIANTS if rows == 8192 and columns == 14336 else ()
        yield Case(op, f"{rows} x {columns}", partial(gate_arguments, op, rows, columns), tried)


def rotary_arguments(op: str, batch: int, positions: int, q_heads: int, k_heads: int, dim: int) -> Arguments:
    packed = normal(batch, positions, (q_heads + 2 * k_heads) * dim)
    q, k, _ = packed.split((q_heads * dim, k_heads * dim, k_heads * dim), dim=-1)
    angles = (torch.rand(batch, positions, dim // 2, device="cuda") * 6).repeat(1, 1, 2)
    angles = angles if "fp32" in op else angles.to(BF16)
    q, k = (x.view(batch, positions, -1, dim).transpose(1, 2) for x in (q, k))
    return q, k, angles.cos(), angles.sin()


def heads(per_block: int, positions: int, half: int = 64) -> Patch:
    return {"pick_tiles": lambda *_: (per_block, positions, half)}


ROTARY_VARIANTS = tuple(
    (f"{h} heads x {p}", heads(h, p)) for h, p in ((8, 2), (8, 8), (8, 16), (4, 8), (16, 2), (1, 32), (2, 32))
)
ROTARY_STEP_VARIANTS = tuple((f"{h} heads", heads(h, 1)) for h in (2, 4, 16))


def rotary_cases(op: str) -> Iterator[Case]:
    models = [(1, 1, 32, 8, 128), (32, 1, 32, 8, 128), (1, 2048, 32, 8, 128), (4, 4096, 32, 8, 128),
              (1, 8192, 64, 8, 128), (1, 2048, 32, 32, 80), (1, 4096, 8, 4, 256),
              (1, 2047, 32, 8, 128)]  # fmt: skip
    for sizes in models:
        tried = ROTARY_VARIANTS if sizes[1] > 1 and sizes[4] < 256 else ()
        tried = ROTARY_STEP_VARIANTS if sizes[:2] == (32, 1) else tried
        label = "{}x{} q{} k{} d{}".format(*sizes)
        yield Case(op, label, partial(rotary_arguments, op, *sizes), tried)


FAMILIES: dict[str, Callable[[str], Iterator[Case]]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "rms_norm_cast_last_add", "layer_norm", "add_layer_norm"), norm_cases),
    **dict.fromkeys(("silu_mul", "silu_mul_packed", "gelu_tanh_mul", "gelu_mul"), gate_cases),
    **dict.fromkeys(("rotary_embedding", "rotary_embedding_fp32"), rotary_cases),
}
#: Not in a plain run: the same kernels with the weight rounded elsewhere.
MORE = ("rms_norm_cast_last", "rms_norm_plus_one", "add_rms_norm_cast_last", "add_rms_norm_plus_one",
        "rms_norm_add", "rms_norm_plus_one_add")  # fmt: skip


@contextmanager
def patched(module: ModuleType, patch: Patch) -> Iterator[None]:
    """Gives a kernel module other tiles, or its kernels another occupancy, for a while."""
    values = dict(patch)
    if "occupancy" in values:
        blocks = values.pop("occupancy")
        kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
        values.update({name: kernel.replace_hints(occupancy=blocks) for name, kernel in kernels.items()})
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def tensors(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def check(case: Case, function: Callable[..., Any], reference: Callable[..., Any]) -> None:
    """Compares one run with the reference in float32.

    Raises:
        SystemExit: the results differ by more than rounding to bfloat16 explains.
    """
    if not (error := relative_error(case, function, reference)) < ALLOWED:
        raise SystemExit(f"error: {case.op} {case.label}: relative error {error:.2e}")


def relative_error(case: Case, function: Callable[..., Any], reference: Callable[..., Any]) -> float:
    """The largest of a run's outputs, beside the reference in float32."""
    arguments = case.make()
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in arguments]
    pairs = list(zip(tensors(reference(*wide)), tensors(function(*arguments)), strict=True))
    return max(float((got.float() - expected).norm() / expected.norm()) for expected, got in pairs)


def moved_bytes(arguments: Arguments, results: Any) -> int:
    inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in (*inputs, *tensors(results)))


def peer_time(case: Case, name: str, peer: Callable[..., Any], reference: Callable[..., Any],
              timed: Callable[[Callable[..., Any]], float]) -> float | None:  # fmt: skip
    """A peer's time; None, and a line that says why, where it refuses the case or gives something else."""
    try:
        error = relative_error(case, peer, reference)
        if error < ALLOWED:
            return timed(peer)
        why = f"relative error {error:.2e}"
    except REFUSALS as problem:
        why = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:120]}"
    print(f"    {name} is left out of {case.op} {case.label}: {why}", flush=True)
    return None


def measure(case: Case, rate: float, with_compile: bool, peers: Mapping[str, Callable[..., Any]]) -> Row:
    function, reference = INVENTORY.entry_point(case.op), INVENTORY.reference(case.op)
    check(case, function, reference)
    sets = argument_sets(case.make)

    def timed(call: Callable[..., Any]) -> float:
        return median_time([partial(call, *arguments) for arguments in sets], rounds=9).microseconds

    ours, eager, compiled = timed(function), timed(reference), math.nan
    if with_compile:
        torch.compiler.reset()
        compiled = timed(torch.compile(reference, dynamic=False, fullgraph=True))
    moved = moved_bytes(sets[0], function(*sets[0])) / ours * 1e6
    row = Row(case.op, case.label, ours, eager, compiled, moved / 1e9, moved / rate,
              host_time(partial(function, *sets[0])) * 1e6)  # fmt: skip
    for name, peer in peers.items():
        if (spent := peer_time(case, name, peer, reference, timed)) is not None:
            row.peers[name] = spent
    for label, patch in case.variants:
        with patched(sys.modules[function.__module__], patch):
            check(case, function, reference)
            row.variants[label] = timed(function)
    return row


def warm_up(cases: list[Case], with_compile: bool) -> None:
    """Runs every case once, only to fill the compilers' caches on disk."""
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case in cases:
            function, reference = INVENTORY.entry_point(case.op), INVENTORY.reference(case.op)
            arguments = case.make()
            function(*arguments)
            if with_compile:
                torch.compiler.reset()
                torch.compile(reference, dynamic=False, fullgraph=True)(*arguments)
            for _, patch in case.variants:
                with patched(sys.modules[function.__module__], patch):
                    function(*arguments)


HEAD = (f"{'op':24}{'shape':34}{'ours us':>9}{'eager':>9}{'compile':>9}{'ahead':>7}{'GB/s':>7}{'copy':>6}"
        f"{'host us':>9}  best other tile")  # fmt: skip


def line(row: Row) -> str:
    peers = "".join(f"  {name} {spent:.1f}" for name, spent in row.peers.items())
    best = min(row.variants, key=row.variants.__getitem__, default="")
    other = f"{best}: {row.variants[best]:.1f}" if best else ""
    return (f"{row.op:24}{row.label:34}{row.ours:9.1f}{row.eager:9.1f}{row.compiled:9.1f}{row.ahead:6.2f}x"
            f"{row.gigabytes_per_second:7.0f}{row.share_of_copy:6.0%}{row.host:9.1f}  {other}{peers}")  # fmt: skip


def summary(rows: list[Row]) -> Iterator[str]:
    for op in dict.fromkeys(row.op for row in rows):
        ratios = [row.ahead for row in rows if row.op == op]
        yield f"{op}: {geometric_mean(ratios):.2f}x the best of the others (geometric mean), min {min(ratios):.2f}"


def known(fields: dict[str, Any]) -> dict[str, Any]:
    """What was not measured as null: JSON has no NaN."""
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in fields.items()}


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(FAMILIES), help="comma-separated ops, or `all`")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the references too")
    parser.add_argument("--peers", action="store_true", help="time Liger and TileGym too, where they are installed")
    parser.add_argument("--variants", action="store_true", help="try other tiles besides the default ones")
    parser.add_argument("--seconds", type=float, default=70, help="start no further case after this time")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def selected_cases(options: argparse.Namespace) -> list[Case]:
    families = {**FAMILIES, **dict.fromkeys(MORE, norm_cases)}
    selected = list(families) if options.ops == "all" else options.ops.split(",")
    if unknown := set(selected) - set(families):
        raise SystemExit(f"error: no such op: {', '.join(sorted(unknown))}; there are {', '.join(families)}")
    cases = [case for op in selected for case in families[op](op)]
    return cases if options.variants else [replace(case, variants=()) for case in cases]


def main(arguments: list[str]) -> None:
    options = options_of(arguments)
    cases = selected_cases(options)
    if options.warm:
        index, workers = map(int, options.warm.split("/"))
        return warm_up(cases[index::workers], options.compile)
    start = time.monotonic()
    warm(__file__, arguments, "--warm", WARM_LIMIT)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e9:.0f} GB/s, "
          f"{time.monotonic() - start:.0f} s compiling\n{HEAD}", flush=True)  # fmt: skip
    rows: list[Row] = []
    for case in cases:
        if time.monotonic() - start > options.seconds:
            print(f"time is up: {len(cases) - len(rows)} cases left out")
            break
        rows.append(measure(case, rate, options.compile, peers_of(case.op) if options.peers else {}))
        print(line(rows[-1]), flush=True)
    print(*summary(rows), sep="\n", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            measured = [known(asdict(row)) | {"ahead": row.ahead} for row in rows]
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "copy_rate": rate, "rows": measured}, file, indent=2)  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
