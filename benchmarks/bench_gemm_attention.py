"""Linear layers and attention on a GPU: our kernels beside cuBLAS, FlashAttention and cuDNN, and which tiles win.

    python benchmarks/bench_gemm_attention.py                       # everything, at most four minutes
    python benchmarks/bench_gemm_attention.py --only gemv,decode    # some of the groups
    python benchmarks/bench_gemm_attention.py --no-sweep --json results.json

A case is first checked against float32 (its worst error in units of one rounding is printed), then timed: median of
graph replays on rotating arguments, so caches are cold. `ours` is what the op runs; `best` is the fastest tiling of
the sweep. Worker processes compile all of it first, into cuda-tile's disk cache; what fails to compile in one of
them is left out of the sweep and listed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from timing import Timing, argument_sets, copy_rate, median_time
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegym_fx import inventory
from tilegym_fx.errors import KernelError

WORKERS = 8
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="groups, separated by commas: gemv, rows8, rows32, ...")
    parser.add_argument("--no-sweep", action="store_true", help="only the tilings that the ops choose")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--seconds", type=float, default=235, help="stop sweeping after this time")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.monotonic()
    groups = [group for group in options.only.split(",") if group]
    cases = [case for case in all_cases() if not groups or case.group in groups]
    if options.no_sweep:
        cases = [replace(case, sweep={}) for case in cases]
    if options.compile_part:
        return compile_part(cases, options.compile_part)
    broken = warm(cases, [a for a in sys.argv[1:] if a not in ("--json", str(options.json))])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuda-tile {ct.__version__}; "
          f"copy {copy_rate() / 1e9:.0f} GB/s; compiled in {time.monotonic() - start:.0f} s")  # fmt: skip
    for label in broken:
        print(f"does not compile: {label}")
    rows = [measured(case, broken, start + options.seconds) for case in cases]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured(case: Case, broken: Sequence[str], end: float) -> dict[str, Any]:
    """One line of the table, and its numbers."""
    sets = argument_sets(case.make)
    error = rounding_error(case, sets[0])
    times = {f"vendor {label}": timed(run, sets) for label, run in case.vendors.items()}
    times["ours"] = timed(case.ours, sets)
    for label, run in case.sweep.items():
        if time.monotonic() < end and f"{case.group} {case.name} {label}" not in broken:
            times[label] = timed(run, sets)
    known = {label: value.microseconds for label, value in times.items() if value is not None}
    vendors = {label: value for label, value in known.items() if label.startswith("vendor ")}
    ours, fastest = known.get("ours"), min(vendors, key=vendors.__getitem__)
    tilings = {label: value for label, value in known.items() if label not in vendors and label != "ours"}
    line = f"{case.group:8} {case.name:26} error {error:4.1f}  {fastest[7:]:7} {known[fastest]:8.1f} us"
    if ours:
        rate = f"{case.bytes / ours / 1e3:5.0f} GB/s" if case.bytes else f"{case.flops / ours / 1e6:5.0f} TFLOP/s"
        line += f"  ours {ours:8.1f} us {rate} {known[fastest] / ours:5.2f}x"
    if tilings:
        best = min(tilings, key=tilings.__getitem__)
        line += f"  best {tilings[best]:8.1f} us {known[fastest] / tilings[best]:5.2f}x {best}"
    print(line, flush=True)
    return {"group": case.group, "name": case.name, "error": error, "microseconds": known,
            "spread": {k: v.spread for k, v in times.items() if v}, "bytes": case.bytes, "flops": case.flops}  # fmt: skip


def timed(run: Run, sets: Sequence[Arguments]) -> Timing | None:
    """The time of one call, or None where the vendor or the compiler refuses the case."""
    calls = [functools.partial(run, *arguments) for arguments in sets]
    try:
        start = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        calls[0]()
        start[0].record()
        calls[-1]()
        start[1].record()
        torch.cuda.synchronize()
        slow = start[0].elapsed_time(start[1]) > 1.0
        return median_time(calls, rounds=5 if slow else 15)
    except (KernelError, RuntimeError) as problem:
        print(f"    left out: {str(problem).splitlines()[0][:120]}")
        return None


def rounding_error(case: Case, arguments: Arguments) -> float:
    """Worst error of the op, in units of one bfloat16 rounding of the largest values of its row."""
    with torch.no_grad():
        got = case.ours(*arguments).float()
        right = case.exact(*arguments)
    scale = right.abs().amax(-1, keepdim=True).clamp_min(1e-6) * 2**-8
    return ((got - right).abs() / scale).max().item()


def compile_part(cases: Sequence[Case], part: str) -> int:
    """Run a share of all tilings once, in a worker process, and print those that fail."""
    index, count = (int(number) for number in part.split("/"))
    jobs = [(case, label) for case in cases for label in ("ours", *case.sweep)]
    jobs.sort(key=lambda job: job[1])
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case, label in jobs[index::count]:
            try:
                (case.ours if label == "ours" else case.sweep[label])(*case.make())
                torch.cuda.synchronize()
            except KernelError as problem:
                print(f"{case.group} {case.name} {label}\t{problem}", flush=True)
    return 0


def warm(cases: Sequence[Case], arguments: Sequence[str]) -> list[str]:
    """Fill the disk cache from several processes; returns the tilings that failed."""
    del cases
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for index in range(WORKERS):
            output = (Path(folder) / str(index)).open("w+")
            command = [sys.executable, __file__, *arguments, "--compile-part", f"{index}/{WORKERS}"]
            workers.append(subprocess.Popen(command, stdout=output, env={**os.environ}))
            outputs.append(output)
        end = time.monotonic() + WARM_LIMIT
        for worker in workers:
            try:
                worker.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
        failed = []
        for output in outputs:
            output.seek(0)
            failed += [line.split("\t")[0] for line in output.read().splitlines() if "\t" in line]
            output.close()
    return failed


@functools.cache
def kernel_module(name: str) -> Any:
    return sys.modules[inventory.load().entry_point(name).__module__]


def all_cases() -> Iterator[Case]:
    yield from linear_cases()
    yield from attention_cases()


#: K -> M of the linears of models: Llama-3.1-8B (k, q or o, packed qkv, gate or up, down), Qwen3-4B, SmolLM2-135M.
LINEARS = ((4096, 1024), (4096, 4096), (4096, 6144), (4096, 14336), (14336, 4096), (2560, 9728), (576, 1536))
HEADS = ((4096, 128256), (768, 50257))


def linear_cases() -> Iterator[Case]:
    kernels = kernel_module("linear")
    tiling = kernels.Tiling
    gemv = [tiling(1, *rest) for rest in (
        (4, 512, 4), (4, 1024, 4), (8, 512, 2), (8, 512, 4), (8, 1024, 4), (16, 512, 4), (16, 1024, 2), (2, 2048, 4),
        (4, 2048, 2),
    )]  # fmt: skip
    gemv += [replace(t, tma=False) for t in (gemv[0], gemv[1], gemv[3], gemv[4], tiling(1, 4, 512, 8))]
    few = [tiling(*rest) for rest in (
        (16, 64, 128, 4), (16, 32, 128, 4), (16, 32, 256, 4), (16, 64, 256, 2), (16, 128, 128, 2), (16, 128, 64, 4),
    )]  # fmt: skip
    some = [tiling(*rest) for rest in (
        (32, 64, 128, 3), (32, 32, 256, 3), (32, 128, 64, 3), (32, 128, 128, 2), (64, 64, 128, 3), (64, 128, 64, 3),
    )]  # fmt: skip
    many = [tiling(*rest) for rest in (
        (128, 128, 64, 2), (128, 128, 64, 1), (128, 128, 64, 1, 8), (128, 256, 64, 1, 8), (256, 128, 64, 1, 8),
        (128, 256, 64, 1, 8, 2), (256, 128, 64, 1, 8, 2), (64, 256, 64, 2),
    )]  # fmt: skip
    for rows, group, tilings in ((1, "gemv", gemv), (8, "rows8", few), (32, "rows32", some)):
        for depth, features in (*LINEARS, *HEADS):
            yield linear_case(kernels, group, rows, depth, features, tilings)
    yield linear_case(kernels, "gemv", 1, 768, 2304, [tiling(1, 64, 64, 4), tiling(1, 128, 32, 4)], column_major=True)
    for rows, group in ((2048, "gemm2k"), (16384, "gemm16k")):
        for depth, features in LINEARS[:6]:
            yield linear_case(kernels, group, rows, depth, features, many)


def linear_case(
    kernels: Any, group: str, rows: int, depth: int, features: int, tilings: Sequence[Any], *, column_major: bool = False
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
        for split in {1, automatic, 2 * automatic} if 1 < rows <= 64 else {1}:
            if split <= depth // tiling.depth:
                chosen = replace(tiling, split=split)
                sweep[tile_label(chosen)] = functools.partial(with_tiling, chosen)
    size = 2 * (rows * depth + features * depth + rows * features)
    layout = " column-major" if column_major else ""
    return Case(
        group, f"{rows}x{depth} -> {features}{layout}", make, kernels.linear, {"cuBLAS": F.linear},
        lambda x, weight: x.float() @ weight.float().t(), sweep,
        bytes=size if rows <= 64 else 0.0, flops=2.0 * rows * depth * features,
    )  # fmt: skip


def tile_label(tiling: Any) -> str:
    """The fields of a tiling, without those that have their usual value."""
    usual = {"worker_warps": 0, "cluster": 1, "tma": True, "split": 1}
    return " ".join(f"{k}={v}" for k, v in asdict(tiling).items() if usual.get(k) != v)


#: batch, query heads, key heads, length, width.
PREFILLS = (
    (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128), (4, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (1, 24, 8, 4096, 64),
    (1, 32, 32, 4096, 96), (1, 8, 4, 4096, 256),
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
    for shape in PREFILLS:
        width = 1 << (shape[-1] - 1).bit_length()
        tilings = [tiling(*rest) for rest in prefill[width]]
        yield prefill_case(kernels, "prefill", *shape, tilings, masked=False)
    for shape in PREFILLS[:2]:
        yield prefill_case(kernels, "masked", *shape, [tiling(*rest) for rest in prefill[128]], masked=True)
    decode = [tiling(0, keys, occupancy, 0, blocks) for keys, occupancy in ((64, 2), (64, 3), (32, 4), (128, 2))
              for blocks in (2, 4, 8)]  # fmt: skip
    for batch, keys in DECODES:
        yield decode_case(kernels, "decode", batch, keys, keys, decode)
    for batch, keys, filled in ((1, 4096, 2048), (1, 16384, 2048), (8, 8192, 2048), (32, 4096, 2048)):
        yield decode_case(kernels, "static", batch, keys, filled, decode[:6])


def heads(batch: int, count: int, length: int, width: int) -> torch.Tensor:
    """[B, H, S, D] as models make it: a transposed view of [B, S, H, D]."""
    return torch.randn(batch, length, count, width, dtype=torch.bfloat16, device="cuda").transpose(1, 2)


def prefill_case(
    kernels: Any, group: str, batch: int, query_heads: int, key_heads: int, length: int, width: int,
    tilings: Sequence[Any], *, masked: bool,
) -> Case:  # fmt: skip
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
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "xformers": SDPBackend.EFFICIENT_ATTENTION}
    return Case(
        group, f"{batch}x{length} {query_heads}/{key_heads} d{width}", make, ours,
        {label: functools.partial(sdpa, backend, not masked) for label, backend in backends.items()},
        lambda q, k, v, mask: exact_attention(q, k, v, scale), {tile_label(t): functools.partial(with_tiling, t) for t in tilings},
        flops=2.0 * batch * query_heads * length * length * width,
    )  # fmt: skip


def decode_case(
    kernels: Any, group: str, batch: int, keys: int, filled: int, tilings: Sequence[Any]
) -> Case:
    """One query a sequence, 32 heads over 8, width 128; `filled` of the keys are seen, by a mask if not all are."""
    query_heads, key_heads, width = 32, 8, 128
    scale = width**-0.5
    masked = group == "static"

    def make() -> Arguments:
        k, v = (torch.randn(batch, key_heads, keys, width, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        mask = torch.arange(keys, device="cuda")[None, None, None].expand(batch, 1, 1, keys) < filled
        return heads(batch, query_heads, 1, width), k, v, mask if masked else None

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
        backends = {"xformers": SDPBackend.EFFICIENT_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return Case(
        group, f"{batch}x1 of {filled}/{keys}", make, ours,
        {label: functools.partial(sdpa, backend, False) for label, backend in backends.items()}, exact,
        {f"{tile_label(t)}": functools.partial(with_tiling, t) for t in tilings},
        bytes=2.0 * 2 * batch * key_heads * filled * width,
    )  # fmt: skip


def sdpa(
    backend: SDPBackend, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
) -> torch.Tensor:
    """PyTorch's attention in one of its backends; the heads of keys repeated first where that needs it."""
    repeat = backend == SDPBackend.EFFICIENT_ATTENTION and q.shape[1] != k.shape[1]
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=not repeat).transpose(1, 2)


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
