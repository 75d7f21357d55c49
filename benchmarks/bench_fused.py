"""Fused decode kernels on a GPU: beside our own kernels one by one, beside cuBLAS and eager, and as a layer.

    python benchmarks/bench_fused.py                        # at most 100 s
    python benchmarks/bench_fused.py --only layer,qkv --no-sweep --json results.json

`fused` is what the op runs. `apart` are our own kernels, one for each op of the Definition; `eager` is its
reference: cuBLAS and PyTorch's kernels. `best` is the fastest of a sweep of tilings. The group `layer` runs
the decode step of whole Llama-3.1-8B layers on rotating weights, also with `overlap`: programmatic dependent
launch, where each kernel starts while the one before drains. Every result is compared with the reference in
float32 first, and the overlapped layer bit by bit with the same layer without.

Times are medians of graph replays on arguments that are not cached (timing.py). A line is printed as soon as
it is known; worker processes compile everything first.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from timing import argument_sets, copy_rate, median_time
from warming import warm

from tilegym_fx import inventory, launch
from tilegym_fx.errors import KernelError

INVENTORY = inventory.load()
BF16 = torch.bfloat16
EPS = 1e-6
#: Seconds for one compilation, and for all of them.
COMPILE_LIMIT = 25
WARM_LIMIT = 55
LAYERS = 4
Arguments = tuple[Any, ...]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        group: What `--only` selects.
        name: The shape, for the table.
        make: Fresh arguments.
        runs: Ways to compute it; `fused` and `eager` are among them.
        sweep: Other tilings of `fused`.
        bytes: Bytes that have to be read.
    """

    group: str
    name: str
    make: Callable[[], Arguments]
    runs: dict[str, Run]
    sweep: dict[str, Run] = field(default_factory=dict)
    bytes: float = 0.0

    def jobs(self) -> Iterator[tuple[str, Run, Case]]:
        """Everything of ours that has to be compiled."""
        for label, run in {**self.runs, **self.sweep}.items():
            if label != "eager":
                yield f"{self.group} {self.name} {label}", run, self


def op(name: str) -> Run:
    return INVENTORY.entry_point(name)


def module(name: str) -> Any:
    return sys.modules[op(name).__module__]


def rows_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def weight_of(features: int, depth: int) -> torch.Tensor:
    return rows_of(features, depth) * depth**-0.5


#: Model: K, features of queries, of keys, of gate and up.
MODELS = {"Llama-8B": (4096, 4096, 1024, 14336), "Qwen3-4B": (2560, 4096, 1024, 9728)}


#: Weights as left operands: features, depth and blocks a multiprocessor.
SWAP = "swap"
TURNED = ((64, 128, 2), (64, 128, 3), (64, 128, 4), (64, 256, 2), (128, 128, 2))
GATED_TURNED = ((64, 128, 2), (64, 128, 1), (64, 64, 3), (64, 64, 4), (128, 64, 2))


def turned(rows: int, tilings: Sequence[Sequence[int]]) -> Iterator[tuple[Any, ...]]:
    """Such tilings for so many rows."""
    for tiling in tilings:
        yield (max(8, rows), *tiling, 0, SWAP)


def gated_cases() -> Iterator[Case]:
    kernels = module("linear_silu_mul")
    one = [(1, 8, 512, 4), (1, 8, 512, 5), (1, 8, 256, 6), (1, 16, 256, 4), (1, 16, 512, 2), (1, 4, 512, 6)]
    few = [
        *((16, 32, 64, 4), (16, 32, 128, 4), (16, 32, 128, 3), (16, 32, 128, 2)),
        *((16, 64, 64, 3), (16, 64, 64, 2), (16, 64, 128, 2)),
    ]
    some = [(32, 32, 64, 4), (32, 32, 128, 3), (32, 64, 64, 3), (32, 64, 64, 2), (32, 64, 128, 2)]
    many = [(128, 128, 64, 1, 8), (256, 64, 64, 1, 8), (128, 64, 64, 2), (128, 128, 64, 1, 4)]
    for model, rows in (
        ("Llama-8B", 1),
        ("Llama-8B", 8),
        ("Llama-8B", 32),
        ("Qwen3-4B", 1),
        ("Llama-8B", 2048),
    ):
        depth, _, _, inner = MODELS[model]

        def make(rows: int = rows, depth: int = depth, inner: int = inner) -> Arguments:
            return rows_of(rows, depth), rows_of(depth), EPS, weight_of(inner, depth), weight_of(inner, depth)

        runs = {
            "fused": op("rms_norm_linear_silu_mul"), "norm + gated": norm_then_gated, "apart": gated_apart,
            "eager": INVENTORY.reference("rms_norm_linear_silu_mul"),
        }  # fmt: skip
        tilings = [*one, *few] if rows == 1 else few if rows <= 16 else some if rows <= 32 else many
        sweep = {
            label(t): functools.partial(gated_with, kernels, kernels.Tiling(*t[:5], swap=SWAP in t))
            for t in [*(turned(rows, GATED_TURNED) if rows <= 32 else ()), *tilings]
        }
        yield Case("gated", f"{model} {rows} rows", make, runs, sweep, 4.0 * depth * inner)


def label(tiling: Sequence[Any]) -> str:
    return "x".join(map(str, tiling))


def norm_then_gated(x: Any, norm: Any, eps: float, gate: Any, up: Any) -> Any:
    return op("linear_silu_mul")(op("rms_norm")(x, norm, eps), gate, up)


def gated_apart(x: Any, norm: Any, eps: float, gate: Any, up: Any) -> Any:
    n = op("rms_norm")(x, norm, eps)
    return op("silu_mul")(op("linear")(n, gate), op("linear")(n, up))


def gated_with(kernels: Any, tiling: Any, x: Any, norm: Any, eps: float, gate: Any, up: Any) -> Any:
    out = torch.empty(x.shape[0], gate.shape[0], dtype=x.dtype, device=x.device)
    if tiling.rows > 1:
        kernels.run_gated(op("rms_norm")(x, norm, eps), None, gate, up, out, kernels.SILU, tiling)
    else:
        kernels.run_gated(x, kernels.Norm(norm, eps), gate, up, out, kernels.SILU, tiling)
    return out


def qkv_cases() -> Iterator[Case]:
    kernels = module("linear_qkv")
    one = [
        *((1, 16, 512, 3), (1, 16, 256, 4), (1, 16, 512, 4), (1, 8, 1024, 3), (1, 16, 1024, 2)),
        *((1, 32, 256, 3), (1, 32, 512, 2), (1, 8, 512, 5)),
    ]
    few = [(16, 32, 128, 3), (16, 32, 128, 4), (16, 32, 256, 2), (16, 64, 128, 2)]
    some = [(32, 32, 128, 4), (32, 32, 256, 2), (32, 64, 128, 2), (32, 64, 64, 4), (32, 128, 64, 2)]
    for model, rows in (("Llama-8B", 1), ("Llama-8B", 8), ("Llama-8B", 32), ("Qwen3-4B", 1)):
        depth, queries, keys, _ = MODELS[model]

        def make(rows: int = rows, depth: int = depth, queries: int = queries, keys: int = keys) -> Arguments:
            weights = (weight_of(size, depth) for size in (queries, keys, keys))
            return rows_of(rows, depth), rows_of(depth), EPS, *weights

        runs = {
            "fused": op("rms_norm_linear_qkv"), "norm + qkv": norm_then_qkv, "apart": qkv_apart,
            "eager": INVENTORY.reference("rms_norm_linear_qkv"),
        }  # fmt: skip
        tilings = [*turned(rows, TURNED), *(one if rows == 1 else ()), *(few if rows <= 16 else some)]
        sweep = {
            label(t): functools.partial(qkv_with, kernels, kernels.Tiling(*t[:5], swap=SWAP in t)) for t in tilings
        }
        size = 2.0 * depth * (queries + 2 * keys)
        yield Case("qkv", f"{model} {rows} rows", make, runs, sweep, size)


def norm_then_qkv(x: Any, norm: Any, eps: float, *weights: Any) -> Any:
    return op("linear_qkv")(op("rms_norm")(x, norm, eps), *weights)


def qkv_apart(x: Any, norm: Any, eps: float, *weights: Any) -> Any:
    n = op("rms_norm")(x, norm, eps)
    return tuple(op("linear")(n, weight) for weight in weights)


def qkv_with(kernels: Any, tiling: Any, x: Any, norm: Any, eps: float, *weights: Any) -> Any:
    outs = tuple(torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device) for w in weights)
    if tiling.rows > 1:
        kernels.run_qkv(op("rms_norm")(x, norm, eps), None, weights, None, outs, tiling)
    else:
        kernels.run_qkv(x, kernels.Norm(norm, eps), weights, None, outs, tiling)
    return outs


def attention_cases() -> Iterator[Case]:
    """One query against a static cache that is nearly full, as transformers masks it."""
    kernels = module("gqa_attention_masked")
    name = "gqa_attention_masked"
    for batch, keys in ((1, 2112), (1, 8256), (8, 2112), (32, 2112)):

        def make(batch: int = batch, keys: int = keys) -> Arguments:
            mask = (torch.arange(keys, device="cuda") < keys - 50).expand(batch, 1, 1, keys)
            k, v = rows_of(2, batch, 8, keys, 128)
            return rows_of(batch, 32, 1, 128), k, v, mask, 128**-0.5

        runs = {"fused": op(name), "eager": INVENTORY.reference(name)}
        tilings = [(0, 64, 3, 0, 1), (0, 64, 3, 0, 4), (0, 128, 2, 0, 2), (0, 32, 4, 0, 4), (0, 128, 2, 0, 1)]
        sweep = {label(t): functools.partial(attention_with, kernels, kernels.Tiling(*t)) for t in tilings}
        yield Case("attention", f"{batch}x{keys} 32/8 d128", make, runs, sweep, 4.0 * batch * keys * 8 * 128)


def attention_with(kernels: Any, tiling: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    y = torch.empty(q.shape[0], 1, q.shape[1], 128, dtype=q.dtype, device=q.device)
    kernels.run_decode(q, k, v, kernels._compact(mask, k.shape[2]), y, scale, tiling)
    return y


def other_cases() -> Iterator[Case]:
    """A projection with its residual, the vocabulary's projection, and norm and rotation of the heads."""
    linears = module("linear")
    deep = [
        (16, 32, 128, 2),
        (16, 32, 256, 2),
        (16, 32, 128, 3),
        (16, 64, 128, 2),
        *((1, 16, 512, 3), (1, 16, 512, 4), (1, 8, 1024, 3), (1, 8, 512, 5), (1, 32, 512, 2), (1, 16, 2048, 2)),
    ]
    for depth, features in ((4096, 4096), (14336, 4096)):

        def make(depth: int = depth, features: int = features) -> Arguments:
            return rows_of(1, depth), weight_of(features, depth), rows_of(1, features)

        runs = {"fused": op("linear_add"), "apart": added_apart, "eager": INVENTORY.reference("linear_add")}
        sweep = {label(t): functools.partial(added_with, linears, linears.Tiling(*t)) for t in deep}
        yield Case("add", f"1x{depth} -> {features}", make, runs, sweep, 2.0 * depth * features)

    def head() -> Arguments:
        return rows_of(1, 4096), rows_of(4096), EPS, weight_of(128256, 4096)

    runs = {
        "fused": op("rms_norm_linear"), "apart": head_apart,
        "eager": INVENTORY.reference("rms_norm_linear"),
    }  # fmt: skip
    tilings = [(1, 16, 512, 3), (1, 8, 512, 4), (1, 16, 1024, 2), (1, 32, 512, 2), (1, 8, 1024, 3), (1, 4, 1024, 4)]
    fused = module("rms_norm_linear")
    sweep = {label(t): functools.partial(head_with, fused, fused.Tiling(*t)) for t in tilings}
    yield Case("head", "1x4096 -> 128256", head, runs, sweep, 2.0 * 4096 * 128256)
    for batch, length in ((1, 1), (32, 1), (1, 2048)):

        def heads(batch: int = batch, length: int = length) -> Arguments:
            q, k = (rows_of(batch, length, count, 128) for count in (32, 8))
            angles = torch.rand(batch, length, 128, device="cuda") * 6
            return q, k, rows_of(128), rows_of(128), EPS, angles.cos().to(BF16), angles.sin().to(BF16)

        name = "rms_norm_rotary_embedding"
        runs = {"fused": op(name), "apart": rotated_apart, "eager": INVENTORY.reference(name)}
        yield Case("rotary", f"{batch}x{length} 32/8 d128", heads, runs, {}, 2.0 * batch * length * 40 * 128)


def added_apart(x: Any, weight: Any, residual: Any) -> Any:
    return residual + op("linear")(x, weight)


def added_with(kernels: Any, tiling: Any, x: Any, weight: Any, residual: Any) -> Any:
    out = torch.empty_like(residual)
    kernels.run_tiling(x, weight, residual, out, kernels.RESIDUAL, tiling)
    return out


def head_apart(x: Any, norm: Any, eps: float, weight: Any) -> Any:
    return op("linear")(op("rms_norm")(x, norm, eps), weight)


def head_with(kernels: Any, tiling: Any, x: Any, norm: Any, eps: float, weight: Any) -> Any:
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    kernels.run_normed(x, kernels.Norm(norm, eps), weight, out, tiling)
    return out


def rotated_apart(q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, cos: Any, sin: Any) -> Any:
    q, k = op("rms_norm")(q, q_weight, eps), op("rms_norm")(k, k_weight, eps)
    return op("rotary_embedding")(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def layer_weights() -> Arguments:
    depth, queries, keys, inner = MODELS["Llama-8B"]
    shapes = [(queries, depth), (keys, depth), (keys, depth), (depth, queries)]
    shapes += [(inner, depth), (inner, depth), (depth, inner)]
    return rows_of(depth), rows_of(depth), *(weight_of(*shape) for shape in shapes)


def layer_cases() -> Iterator[Case]:
    for batch, keys in ((1, 2048), (8, 2048)):

        def make(batch: int = batch, keys: int = keys) -> Arguments:
            angles = torch.rand(batch, 1, 128, device="cuda") * 6
            cache = [rows_of(2, batch, 8, keys, 128) for _ in range(LAYERS)]
            weights = [layer_weights() for _ in range(LAYERS)]
            return rows_of(batch, 4096), angles.cos().to(BF16), angles.sin().to(BF16), cache, weights

        runs = {
            "fused": functools.partial(layers, fused_layer), "overlap": overlapped,
            "apart": functools.partial(layers, layer_apart), "eager": functools.partial(layers, eager_layer),
        }  # fmt: skip
        size = 2.0 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * batch * 8 * keys * 128)
        yield Case("layer", f"batch {batch}, {keys} keys", make, runs, {}, size)


def layers(layer: Run, x: Any, cos: Any, sin: Any, caches: Any, weights: Any) -> Any:
    for cache, own in zip(caches, weights, strict=True):
        x = layer(x, cos, sin, *cache, *own)
    return x


def overlapped(*arguments: Any) -> Any:
    with overlap():
        return layers(fused_layer, *arguments)


@contextmanager
def overlap() -> Iterator[None]:
    """Launches all kernels so that they may start early; every kernel here waits before it reads."""
    plain = launch._cuda_launch
    launch._cuda_launch = functools.partial(plain, programmatic_dependent_launch=True)
    try:
        yield
    finally:
        launch._cuda_launch = plain


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], 1, -1, 128).transpose(1, 2)


def fused_layer(
    x: Any, cos: Any, sin: Any, keys: Any, values: Any,
    n1: Any, n2: Any, q: Any, k: Any, v: Any, o: Any, gate: Any, up: Any, down: Any,
) -> Any:  # fmt: skip
    q, k, v = op("rms_norm_linear_qkv")(x, n1, EPS, q, k, v)
    q, k = op("rotary_embedding")(by_heads(q), by_heads(k), cos, sin)
    y = op("gqa_attention")(q, keys, values, 128**-0.5)
    x = op("linear_add")(y.view(x.shape), o, x)
    return op("linear_add")(op("rms_norm_linear_silu_mul")(x, n2, EPS, gate, up), down, x)


def layer_apart(
    x: Any, cos: Any, sin: Any, keys: Any, values: Any,
    n1: Any, n2: Any, q: Any, k: Any, v: Any, o: Any, gate: Any, up: Any, down: Any,
) -> Any:  # fmt: skip
    n = op("rms_norm")(x, n1, EPS)
    q, k, v = (op("linear")(n, weight) for weight in (q, k, v))
    q, k = op("rotary_embedding")(by_heads(q), by_heads(k), cos, sin)
    y = op("gqa_attention")(q, keys, values, 128**-0.5)
    n, x = op("add_rms_norm")(op("linear")(y.view(x.shape), o), x, n2, EPS)
    return op("linear_add")(op("silu_mul")(op("linear")(n, gate), op("linear")(n, up)), down, x)


def eager_layer(
    x: Any, cos: Any, sin: Any, keys: Any, values: Any,
    n1: Any, n2: Any, q: Any, k: Any, v: Any, o: Any, gate: Any, up: Any, down: Any,
) -> Any:  # fmt: skip
    norm, rotate = INVENTORY.reference("rms_norm"), INVENTORY.reference("rotary_embedding")
    n = norm(x, n1, EPS)
    q, k, v = (F.linear(n, weight) for weight in (q, k, v))
    q, k = rotate(by_heads(q), by_heads(k), cos, sin)
    y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(y, o)
    n = norm(x, n2, EPS)
    return x + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


def all_cases() -> list[Case]:
    return [*layer_cases(), *gated_cases(), *qkv_cases(), *attention_cases(), *other_cases()]


def wide(value: Any) -> Any:
    """The arguments in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    return type(value)(map(wide, value)) if isinstance(value, list | tuple) else value


def error_of(case: Case, arguments: Arguments) -> float:
    """Largest relative error of the fused results, as a norm."""
    got, right = case.runs["fused"](*arguments), case.runs["eager"](*wide(arguments))
    pairs = zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, right)), strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def measured(case: Case, rate: float, end: float) -> dict[str, Any]:
    """Prints one line of the table and returns its numbers."""
    sets = [case.make()] if case.group == "layer" else argument_sets(case.make)
    error = error_of(case, sets[0])
    per = LAYERS if case.group == "layer" else 1
    times: dict[str, float] = {}
    for name, run in {**case.runs, **case.sweep}.items():
        if name in case.runs or time.monotonic() < end:
            try:
                calls = [functools.partial(run, *arguments) for arguments in sets]
                times[name] = median_time(calls, rounds=11).microseconds / per
            except (KernelError, RuntimeError) as problem:
                print(f"    {name} left out: {str(problem).splitlines()[0][:100]}", flush=True)
    known = "  ".join(f"{name} {times[name]:7.1f}" for name in case.runs if name in times)
    fused = times.get("fused", math.nan)
    sweep = {name: spent for name, spent in times.items() if name in case.sweep}
    best = min(sweep, key=sweep.__getitem__, default="")
    print(f"{case.group:7}{case.name:22} error {error:.1e}  {known}  ({case.bytes / fused / 1e3:5.0f} GB/s, "
          f"floor {case.bytes / rate * 1e6:6.1f})" + (f"  best {sweep[best]:7.1f} {best}" if best else ""),
          flush=True)  # fmt: skip
    return {
        "group": case.group,
        "name": case.name,
        "error": error,
        "bytes": case.bytes,
        "microseconds": times,
    }


def races(case: Case) -> str:
    """Whether overlapped layers in a graph give exactly what the same layers give one after the other."""
    arguments = case.make()
    right = layers(fused_layer, *arguments)
    overlapped(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = overlapped(*arguments)
    wrong = 0
    for _ in range(50):
        got.zero_()
        graph.replay()
        wrong += not torch.equal(got, right)
    return f"overlap, {case.name}: {wrong} of 50 replays differ"


def compile_part(cases: Sequence[Case], part: str) -> None:
    """Runs a share of everything of ours once."""
    index, count = map(int, part.split("/"))
    jobs = [job for case in cases for job in case.jobs()]
    with ct.compiler_timeout(COMPILE_LIMIT):
        for name, run, case in jobs[index::count]:
            try:
                run(*case.make())
                torch.cuda.synchronize()
            except (KernelError, RuntimeError) as problem:
                print(f"{name}: {str(problem).splitlines()[0][:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fused kernels beside the same work in several launches.")
    parser.add_argument("--only", default="", help="groups, separated by commas: layer, gated, qkv, add, ...")
    parser.add_argument("--no-sweep", action="store_true", help="only the tilings that the ops choose")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--seconds", type=float, default=85, help="stop sweeping after this time")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups = [group for group in options.only.split(",") if group]
    cases = [case for case in all_cases() if not groups or case.group in groups]
    if options.no_sweep:
        cases = [replace(case, sweep={}) for case in cases]
    if options.compile_part:
        return compile_part(cases, options.compile_part)
    start = time.monotonic()
    warm(
        __file__, ["--only", options.only, *(["--no-sweep"] if options.no_sweep else [])], "--compile-part", WARM_LIMIT
    )
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e9:.0f} GB/s, "
          f"compiled in {time.monotonic() - start:.0f} s; microseconds", flush=True)  # fmt: skip
    rows = []
    for case in cases:
        if case.group == "layer":
            print(races(case), flush=True)
        rows.append(measured(case, rate, start + options.seconds))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    print(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
