"""Linear layers and attention on a GPU: our kernels beside cuBLAS, FlashAttention, cuDNN and TileGym; which tiles win.

    python benchmarks/bench_gemm_attention.py                       # everything, at most four minutes
    python benchmarks/bench_gemm_attention.py --only gemv,decode    # some of the groups
    python benchmarks/bench_gemm_attention.py --no-sweep --json results.json

A case is first checked against float32: its worst error is printed, in units of one bfloat16 rounding of
the largest value in the row. Then it is timed: median of graph replays on rotating arguments, so caches are
cold. `ours` is what the op runs; `best` is the fastest tiling of the sweep. Worker processes compile
everything first, into cuda-tile's disk cache; what fails to compile there is listed and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from peers import REFUSALS, peers_of
from timing import Timing, argument_sets, copy_rate, median_time
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegym_fx import inventory
from tilegym_fx.errors import KernelError

WORKERS = 8
#: Roundings by which a vendor's result may be off and still be timed.
ALLOWED = 8.0
#: Seconds for one compilation, and for all of them.
COMPILE_LIMIT = 40
WARM_LIMIT = 110
Arguments = tuple[Any, ...]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        group: What `--only` selects.
        name: The shape, for the table.
        make: Fresh arguments.
        ours: The op.
        vendors: What it is measured against.
        exact: The float32 result of the same arguments.
        sweep: Other tilings of the op.
        bytes: Bytes that have to be read and written.
        flops: Arithmetic that has to be done.
    """

    group: str
    name: str
    make: Callable[[], Arguments]
    ours: Run
    vendors: dict[str, Run]
    exact: Run
    sweep: dict[str, Run] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0

    def key(self, label: str) -> str:
        """Names one tiling of this case."""
        return f"{self.group} {self.name} {label}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Linear layers and attention beside the vendor libraries.")
    parser.add_argument("--only", default="", help="groups, separated by commas: gemv, rows8, decode, ...")
    parser.add_argument("--no-sweep", action="store_true", help="only the tilings that the ops choose")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--seconds", type=float, default=230, help="stop sweeping after this time")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.monotonic()
    groups = [group for group in options.only.split(",") if group]
    cases = [case for case in all_cases() if not groups or case.group in groups]
    if options.no_sweep:
        cases = [replace(case, sweep={}) for case in cases]
    if options.compile_part:
        return compile_part(cases, options.compile_part)
    broken = warm(["--only", options.only, *(["--no-sweep"] if options.no_sweep else [])])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy_rate() / 1e9:.0f} GB/s")
    print(f"compiled in {time.monotonic() - start:.0f} s; failed: {', '.join(broken) or 'none'}", flush=True)
    rows = [measured(case, broken, start + options.seconds) for case in cases]
    print(*summary(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"done in {time.monotonic() - start:.0f} s")
    return 0


def measured(case: Case, broken: Sequence[str], end: float) -> dict[str, Any]:
    """One line of the table, and its numbers."""
    sets = argument_sets(case.make)
    right = case.exact(*sets[0])
    error = rounding_error(case.ours, sets[0], right)
    runs = {"ours": case.ours, **{f"vendor {label}": run for label, run in case.vendors.items()}}
    times = {
        label: timed(run, sets)
        for label, run in runs.items()
        if run is case.ours or is_right(label, run, sets[0], right)
    }
    for label, run in case.sweep.items():
        if time.monotonic() < end and case.key(label) not in broken:
            times[label] = timed(run, sets)
    known = {label: value.microseconds for label, value in times.items() if value is not None}
    vendor, vendor_time = fastest({k: v for k, v in known.items() if k in runs and k != "ours"})
    best, best_time = fastest({k: v for k, v in known.items() if k not in runs})
    ours = known.get("ours", math.nan)
    rate = f"{case.bytes / ours / 1e3:5.0f} GB/s" if case.bytes else f"{case.flops / ours / 1e6:5.0f} TF/s"
    print(f"{case.group:7} {case.name:27} error {error:4.1f}  {vendor[7:]:8} {vendor_time:8.1f} us  "
          f"ours {ours:8.1f} us {rate} {vendor_time / ours:5.2f}x  "
          f"best {best_time:8.1f} us {vendor_time / best_time:5.2f}x {best}", flush=True)  # fmt: skip
    numbers = {"error": error, "microseconds": known, "bytes": case.bytes, "flops": case.flops}
    spread = {label: value.spread for label, value in times.items() if value is not None}
    return {"group": case.group, "name": case.name, **numbers, "spread": spread}


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each group the vendors' best time over ours: geometric mean and worst."""
    for group in dict.fromkeys(row["group"] for row in rows):
        times = [row["microseconds"] for row in rows if row["group"] == group]
        ratios = [
            min(others) / own["ours"]
            for own in times
            if "ours" in own and (others := [t for label, t in own.items() if label.startswith("vendor ")])
        ]
        if ratios:
            mean = geometric_mean(ratios)
            yield f"{group}: {mean:.2f}x the best vendor (geometric mean of {len(ratios)}), worst {min(ratios):.2f}"


def fastest(times: dict[str, float]) -> tuple[str, float]:
    return min(times.items(), key=lambda item: item[1], default=("", math.nan))


def timed(run: Run, sets: Sequence[Arguments]) -> Timing | None:
    """The time of one call, or None where the vendor or the compiler refuses the case."""
    calls = [functools.partial(run, *arguments) for arguments in sets]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        calls[0]()
        start.record()
        calls[-1]()
        end.record()
        torch.cuda.synchronize()
        return median_time(calls, rounds=5 if start.elapsed_time(end) > 1.0 else 15)
    except (KernelError, RuntimeError) as problem:
        print(f"    left out: {str(problem).splitlines()[0][:100]}")
        return None


def rounding_error(run: Run, arguments: Arguments, right: torch.Tensor) -> float:
    """Worst error of a run, in units of one bfloat16 rounding of the largest values of its row."""
    scale = right.abs().amax(-1, keepdim=True).clamp_min(1e-6) * 2**-8
    return ((run(*arguments).float() - right).abs() / scale).max().item()


def is_right(label: str, run: Run, arguments: Arguments, right: torch.Tensor) -> bool:
    """Whether a vendor's kernel takes the case and gives its result; a line says why not."""
    try:
        error = rounding_error(run, arguments, right)
    except REFUSALS as problem:
        print(f"    {label} left out: {str(problem).partition(chr(10))[0][:100]}")
        return False
    if error > ALLOWED:
        print(f"    {label} left out: {error:.0f} roundings off")
    return error <= ALLOWED


def compile_part(cases: Sequence[Case], part: str) -> int:
    """Run a share of all tilings once, in a worker process, and print those that fail."""
    index, count = (int(number) for number in part.split("/"))
    jobs: dict[str, list[tuple[str, Run, Case]]] = {}
    for case in cases:
        jobs.setdefault(case.key("ours"), []).append((case.key("ours"), case.ours, case))
        for label, run in case.sweep.items():  # one tiling's shapes share compiled code: the same worker
            jobs.setdefault(f"{case.group[:4]} {label}", []).append((case.key(label), run, case))
    with ct.compiler_timeout(COMPILE_LIMIT):
        for share in sorted(jobs)[index::count]:
            for key, run, case in jobs[share]:
                if (problem := problem_of(run, case)) is not None:
                    print(f"{key}\t{problem}", flush=True)
    return 0


def problem_of(run: Run, case: Case) -> str | None:
    try:
        run(*case.make())
        torch.cuda.synchronize()
    except KernelError as problem:
        return str(problem)
    return None


def warm(arguments: Sequence[str]) -> list[str]:
    """Fill the disk cache from several processes; returns the keys of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(index) for index in range(WORKERS)]
        workers = []
        for index, output in enumerate(outputs):
            command = [sys.executable, __file__, *arguments, "--compile-part", f"{index}/{WORKERS}"]
            with output.open("w") as file:
                workers.append(subprocess.Popen(command, stdout=file))
        end = time.monotonic() + WARM_LIMIT
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.1, end - time.monotonic()))
            worker.kill()
            worker.wait()
        lines = [line for output in outputs for line in output.read_text().splitlines() if "\t" in line]
    return [line.split("\t")[0] for line in lines]


@functools.cache
def kernel_module(name: str) -> Any:
    return sys.modules[inventory.load().entry_point(name).__module__]


def all_cases() -> Iterator[Case]:
    yield from linear_cases()
    yield from attention_cases()


#: K -> M in models: Llama-3.1-8B (k, q or o, packed qkv, gate or up, down), Qwen3-4B, SmolLM2-135M.
LINEARS = ((4096, 1024), (4096, 4096), (4096, 6144), (4096, 14336), (14336, 4096), (2560, 9728), (576, 1536))
HEADS = ((4096, 128256), (768, 50257))


def linear_cases() -> Iterator[Case]:
    kernels = kernel_module("linear")
    tiling = kernels.Tiling
    gemv = [
        *((4, 512, 4), (4, 1024, 4), (8, 512, 2), (8, 512, 4), (8, 1024, 4), (16, 512, 4), (16, 1024, 2)),
        *((2, 2048, 4), (4, 2048, 2)),
    ]
    direct = [(4, 512, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 4), (4, 512, 8)]
    few = [(64, 128, 4), (32, 128, 4), (32, 256, 4), (64, 256, 2), (128, 128, 2), (128, 64, 4)]
    some = [(64, 128, 3), (32, 256, 3), (128, 64, 3), (128, 128, 2), (32, 64, 4), (16, 128, 4), (64, 64, 4)]
    many = [
        *((128, 128, 64, 2), (128, 128, 64, 1), (128, 128, 64, 1, 8), (128, 256, 64, 1, 8)),
        *((256, 128, 64, 1, 8), (128, 256, 64, 1, 8, 2), (256, 128, 64, 1, 8, 2), (64, 256, 64, 2)),
    ]
    turned = [(64, 128, 2), (64, 128, 3), (64, 128, 4), (64, 256, 2), (128, 128, 2), (64, 64, 4)]
    walking = ((256, 128, 64, 1, 8), (128, 256, 64, 1, 8), (256, 256, 64, 1, 8, 2), (512, 128, 64, 1, 8, 2))
    tilings = {
        "gemv": [
            *(tiling(8, *t, swap=True) for t in turned),
            *(tiling(1, *t) for t in gemv),
            *(tiling(1, *t, tma=False) for t in direct),
            *(tiling(16, *t) for t in few[:3]),
        ],
        "rows8": [*(tiling(8, *t, swap=True) for t in turned), *(tiling(16, *t) for t in few)],
        "rows32": [
            *(tiling(32, *t, swap=True) for t in turned),
            *(tiling(32, *t) for t in some),
            *(tiling(64, 64, 128, 3), tiling(64, 128, 64, 3)),
        ],
        "gemm": [
            *(tiling(*t) for t in many),
            *(tiling(*t, latency=latency, persistent=True) for t in walking for latency in (0, 6)),
            tiling(128, 128, 64, 2, 4, latency=2, persistent=True),
        ],
    }
    for rows, group in ((1, "gemv"), (8, "rows8"), (32, "rows32")):
        for sizes in (*LINEARS, *HEADS):
            yield linear_case(kernels, group, rows, *sizes, tilings[group])
    columns = [tiling(1, *t) for t in ((16, 512, 4), (32, 256, 4), (32, 128, 4), (64, 64, 4))]
    columns += [tiling(16, *t) for t in ((16, 256, 4), (32, 128, 4), (64, 128, 4))]
    yield linear_case(kernels, "gemv", 1, 768, 2304, columns, column_major=True)
    for rows in (2048, 16384):
        for sizes in LINEARS[:6]:
            yield linear_case(kernels, f"gemm{rows // 1024}k", rows, *sizes, tilings["gemm"])


def linear_case(
    kernels: Any, group: str, rows: int, depth: int, features: int, tilings: Sequence[Any],
    *, column_major: bool = False,
) -> Case:  # fmt: skip
    def make() -> Arguments:
        weight = torch.randn(features, depth, dtype=torch.bfloat16, device="cuda") * depth**-0.5
        if column_major:
            weight = weight.t().contiguous().t()
        return torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda"), weight

    def with_tiling(tiling: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
        kernels.run_tiling(x, weight, None, y, kernels.NOTHING, tiling)
        return y

    sweep = {}
    automatic = kernels.choose_tiling(rows, features, depth).split
    for tiling in tilings:
        for split in sorted({1, automatic, 2 * automatic, 2 * tiling.swap}) if tiling.rows > 1 and rows <= 64 else (1,):
            if 0 < split <= max(1, depth // tiling.depth):
                chosen = replace(tiling, split=split)
                sweep[tile_label(chosen)] = functools.partial(with_tiling, chosen)
    size = 2 * (rows * depth + features * depth + rows * features)
    layout = " column-major" if column_major else ""
    return Case(
        group, f"{rows}x{depth} -> {features}{layout}", make, kernels.linear,
        {"cuBLAS": F.linear, **peers_of("linear")},
        lambda x, weight: x.float() @ weight.float().t(), sweep,
        bytes=size if rows <= 64 else 0.0, flops=2.0 * rows * depth * features,
    )  # fmt: skip


def tile_label(tiling: Any) -> str:
    """The fields of a tiling, without those that have their usual value."""
    usual = {"worker_warps": 0, "cluster": 1, "tma": True, "split": 1, "latency": 0, "persistent": False,
             "swap": False}  # fmt: skip
    return " ".join(f"{k}={v}" for k, v in asdict(tiling).items() if usual.get(k) != v)


#: batch, query heads, key heads, length, width.
PREFILLS = (
    (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128), (4, 32, 8, 4096, 128), (1, 32, 8, 16384, 128),
    (1, 24, 8, 4096, 64), (1, 32, 32, 4096, 96), (1, 8, 4, 4096, 256),
)  # fmt: skip
DECODES = tuple((batch, keys) for keys in (2048, 8192) for batch in (1, 8, 32))


def attention_cases() -> Iterator[Case]:
    kernels = kernel_module("gqa_attention")
    tiling = kernels.Tiling
    prefill = {
        64: [(64, 128, 2), (128, 128, 2, 8), (128, 128, 1, 8), (64, 64, 3)],
        128: [(64, 128, 2), (64, 64, 2), (128, 128, 1, 8), (128, 64, 1, 8), (128, 64, 2, 8)],
        256: [(64, 64, 1), (128, 64, 1, 8), (64, 32, 2), (128, 32, 1, 8)],
    }
    for index, shape in enumerate((*PREFILLS, *PREFILLS[:2])):
        tilings = [tiling(*t) for t in prefill[1 << (shape[-1] - 1).bit_length()]]
        yield prefill_case(kernels, shape, tilings, masked=index >= len(PREFILLS))
    steps = ((64, 2), (64, 3), (64, 4), (32, 4), (32, 6), (128, 2), (128, 3), (256, 1))
    decode = [tiling(0, *step, 0, blocks) for step in steps for blocks in (1, 2, 4)]
    for batch, keys in DECODES:
        yield decode_case(kernels, batch, keys, keys, decode)
    for batch, keys in ((1, 4096), (1, 16384), (8, 8192), (32, 4096)):
        yield decode_case(kernels, batch, keys, 2048, decode)


def heads(batch: int, count: int, length: int, width: int) -> torch.Tensor:
    """[B, H, S, D] as models make it: a transposed view of [B, S, H, D]."""
    return torch.randn(batch, length, count, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2)


def prefill_case(kernels: Any, shape: tuple[int, ...], tilings: Sequence[Any], *, masked: bool) -> Case:
    """Causal attention, by a flag or by a boolean mask."""
    batch, query_heads, key_heads, length, width = shape
    scale = width**-0.5

    def make() -> Arguments:
        q = heads(batch, query_heads, length, width)
        k, v = heads(batch, key_heads, length, width), heads(batch, key_heads, length, width)
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None] if masked else None
        return q, k, v, mask

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        if mask is None:
            return kernels.gqa_attention_causal(q, k, v, scale)
        return kernels.gqa_attention_masked(q, k, v, mask, scale)

    def with_tiling(tiling: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        y = torch.empty(batch, length, query_heads, width, dtype=q.dtype, device=q.device)
        mask = None if mask is None else mask.view(torch.uint8)
        kernels.run_prefill(q, k, v, mask, y, scale, not masked, tiling)
        return y

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if masked:
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "mem-eff": SDPBackend.EFFICIENT_ATTENTION}
    return Case(
        "masked" if masked else "prefill",
        f"{batch}x{length} {query_heads}/{key_heads} d{width}",
        make,
        ours,
        {
            **{label: functools.partial(sdpa, backend, not masked) for label, backend in backends.items()},
            **({} if masked else with_scale(peers_of("gqa_attention_causal"), scale)),
        },
        lambda q, k, v, mask: exact_attention(q, k, v, scale),
        {tile_label(t): functools.partial(with_tiling, t) for t in tilings},
        flops=2.0 * batch * query_heads * length * length * width,
    )


def decode_case(kernels: Any, batch: int, keys: int, filled: int, tilings: Sequence[Any]) -> Case:
    """One query a sequence, 32 heads over 8, width 128; a mask where only `filled` of the keys are seen."""
    query_heads, key_heads, width = 32, 8, 128
    scale = width**-0.5
    masked = filled < keys

    def make() -> Arguments:
        cache = torch.randn(2, batch, key_heads, keys, width, dtype=torch.bfloat16, device="cuda")
        mask = torch.arange(keys, device="cuda")[None, None, None].expand(batch, 1, 1, keys) < filled
        return heads(batch, query_heads, 1, width), *cache, mask if masked else None

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        if mask is None:
            return kernels.gqa_attention(q, k, v, scale)
        return kernels.gqa_attention_masked(q, k, v, mask, scale)

    def with_tiling(tiling: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        y = torch.empty(batch, 1, query_heads, width, dtype=q.dtype, device=q.device)
        kernels.run_decode(q, k, v, None if mask is None else mask.view(torch.uint8), y, scale, tiling)
        return y

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        k, v = (x[:, :, :filled].float().repeat_interleave(query_heads // key_heads, 1) for x in (k, v))
        return (torch.softmax(q.float() @ k.mT * scale, -1) @ v).transpose(1, 2)

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if masked:
        backends = {"mem-eff": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return Case(
        "static" if masked else "decode",
        f"{batch}x1 of {filled}/{keys}",
        make,
        ours,
        {
            **{label: functools.partial(sdpa, backend, False) for label, backend in backends.items()},
            **({} if masked else with_scale(peers_of("gqa_attention"), scale)),
        },
        exact,
        {tile_label(t): functools.partial(with_tiling, t) for t in tilings},
        bytes=2.0 * 2 * batch * key_heads * filled * width,
    )


def with_scale(peers: Mapping[str, Run], scale: float) -> dict[str, Run]:
    """Kernels of other libraries, called as the op is but for the scale."""
    return {name: functools.partial(run, scale=scale) for name, run in peers.items()}


def sdpa(
    backend: SDPBackend, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
) -> torch.Tensor:
    """PyTorch's attention in one of its backends; the heads of keys repeated first where that needs it."""
    repeat = backend == SDPBackend.EFFICIENT_ATTENTION and q.shape[1] != k.shape[1]
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=not repeat)
    return out.transpose(1, 2)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in float32, head by head, a thousand queries at a time."""
    batch, query_heads, length, width = q.shape
    out = torch.empty(batch, length, query_heads, width, device=q.device)
    column = torch.arange(length, device=q.device)
    for b in range(batch):
        for head in range(query_heads):
            key_head = head * k.shape[1] // query_heads
            keys, values = k[b, key_head].float(), v[b, key_head].float()
            for start in range(0, length, 1024):
                rows = slice(start, start + 1024)
                scores = q[b, head, rows].float() @ keys.t() * scale
                scores.masked_fill_(column > column[rows, None], float("-inf"))
                out[b, rows, head] = torch.softmax(scores, -1) @ values
    return out


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
