"""Routed experts on a GPU: our fused op, our single ops and torch's grouped product, over models and numbers of tokens.

    python benchmarks/bench_experts.py                                  # at most 300 s
    python benchmarks/bench_experts.py --only qwen3-30b-a3b --tokens 1 2048 --sweep --json results.json
    python benchmarks/bench_experts.py --dry-run                        # on a CPU: small shapes, interpreted

`fused` is experts_silu or experts_clamped; `parts` is experts_rows, grouped_linear, the gate, grouped_linear and
experts_combine, for prompts with torch's grouped product in it; `torch` is what transformers runs, with F.grouped_mm,
under torch.compile. `--sweep` tries other tilings of our own products. Every form is compared with float32 first.
Times are medians of graph replays on weights that are not in the L2 cache (timing.py); GB/s counts the weights of
the experts that some token chose. Worker processes compile first.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import cuda.tile as ct
import one_by_one
import torch
import torch.nn.functional as F
from timing import argument_sets, median_time

from tilegym_fx import inventory

INVENTORY = inventory.load()
GROUPED, FUSED = (sys.modules[INVENTORY.entry_point(name).__module__] for name in ("grouped_linear", "experts_silu"))
PROMPT = sys.modules[FUSED.Prompt.__module__]
#: Experts, of a token, hidden size, intermediate size, and whether biased, clamped and stored [in, out].
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, False),
    "deepseek-v2-lite": (64, 6, 2048, 1408, False),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
}
ALPHA, LIMIT = 1.702, 7.0
TOLERANCE = 1e-2
#: Rows, columns, depth and occupancy of a product; where an expert has many rows, its warps and prefetch depth too.
TILINGS = (
    (16, 32, 256, 3), (16, 64, 128, 3), (16, 64, 256, 2), (16, 128, 64, 3), (16, 128, 128, 2), (32, 64, 128, 2),
    (32, 128, 64, 3), (64, 64, 64, 3), (64, 128, 64, 2), (64, 128, 128, 1), (128, 64, 64, 2), (128, 128, 64, 1),
    (128, 128, 64, 2), (128, 256, 64, 1),
)  # fmt: skip
PROMPT_TILINGS = (
    (64, 128, 64, 2, 4, 3), (64, 128, 64, 3, 4, 3), (64, 256, 64, 1, 8, 6), (64, 128, 128, 1, 4, 3),
    (128, 128, 64, 1, 8, 6), (128, 128, 64, 2, 8, 3), (128, 256, 64, 1, 8, 4), (128, 256, 64, 1, 8, 6),
)  # fmt: skip
COMPILE_LIMIT = 40
WARM_LIMIT = 90
Arguments = tuple[Any, ...]
Run = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """The experts of one layer.

    Attributes:
        name: Of the model.
        experts: How many.
        chosen: By each token.
        hidden: Width of a token.
        inner: Width inside an expert.
        clamped: Whether the gate is clamped, with biases and weights stored [in, out].
        tokens: How many.
    """

    name: str
    experts: int
    chosen: int
    hidden: int
    inner: int
    clamped: bool
    tokens: int

    def __str__(self) -> str:
        return f"{self.name} {self.tokens} tokens"

    def make(self, device: str) -> Arguments:
        """Tokens, their experts and weights, and the matrices and biases of the experts."""
        make = {"dtype": torch.bfloat16, "device": device}
        logits = torch.empty(self.tokens, self.experts, device=device).normal_()
        weights, index = logits.softmax(-1).topk(self.chosen)
        x = torch.empty(self.tokens, self.hidden, **make).normal_()
        shapes = [(2 * self.inner, self.hidden), (self.hidden, self.inner)]
        matrices = [torch.empty(self.experts, *shape, **make).normal_(std=shape[1] ** -0.5) for shape in shapes]
        if not self.clamped:
            return x, index, weights.to(x.dtype), *matrices
        up, down = (m.mT.contiguous() for m in matrices)
        biases = [torch.empty(self.experts, m.shape[2], **make).normal_() for m in (up, down)]
        return x, index, weights.to(x.dtype), up, biases[0], down, biases[1]


def gated(both: torch.Tensor, clamped: bool) -> torch.Tensor:
    """The gate as transformers writes it."""
    if not clamped:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def split(case: Case, arguments: Arguments) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Matrices as [in, out] views, and biases."""
    if case.clamped:
        return [arguments[3], arguments[5]], [arguments[4], arguments[6]]
    return [m.mT for m in arguments[3:]], [None, None]


def by_torch(case: Case, *arguments: Any) -> torch.Tensor:
    """Sorted, multiplied by group, put back in order and summed."""
    x, index, weights = arguments[:3]
    ids, order = index.reshape(-1).sort()
    ends = torch.histc(ids.int(), case.experts, 0, case.experts - 1).cumsum(0, dtype=torch.int32)
    rows = x[order // case.chosen]
    for step, (matrix, bias) in enumerate(zip(*split(case, arguments), strict=True)):
        rows = F.grouped_mm(rows, matrix, offs=ends)
        rows = rows if bias is None else rows + bias[ids]
        rows = gated(rows, case.clamped) if step == 0 else rows
    rows = rows * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(case.tokens, case.chosen, -1).sum(1)


def by_parts(case: Case, *arguments: Any) -> torch.Tensor:
    """Our single ops, which take no biases."""
    point = INVENTORY.entry_point
    x, index, weights, up, down = arguments
    rows, order, ends = point("experts_rows")(x, index, case.experts)
    rows = point("silu_mul_packed")(point("grouped_linear")(rows, up.mT, ends))
    return point("experts_combine")(point("grouped_linear")(rows, down.mT, ends), weights, order)


def fused(case: Case, *arguments: Any) -> torch.Tensor:
    if case.clamped:
        return INVENTORY.entry_point("experts_clamped")(*arguments, ALPHA, LIMIT)
    return INVENTORY.entry_point("experts_silu")(*arguments)


def exact(case: Case, *arguments: Any) -> torch.Tensor:
    """In float32, expert by expert."""
    x, index, weights = arguments[:3]
    out = torch.zeros(case.tokens, case.hidden, device=x.device)
    matrices, biases = split(case, arguments)
    for expert in index.unique().tolist():
        token, place = torch.where(index == expert)
        rows = x[token].float()
        for step, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            rows = rows @ matrix[expert].float()
            rows = rows if bias is None else rows + bias[expert].float()
            rows = gated(rows, case.clamped) if step == 0 else rows
        out.index_add_(0, token, rows * weights[token, place, None].float())
    return out


@contextmanager
def tiled(tiling: Sequence[int] | None) -> Iterator[None]:
    """Our own products, cut in this way, for a while; None leaves the choice to the kernels."""
    with ExitStack() as stack:
        if tiling is not None and len(tiling) == len(PROMPT_TILINGS[0]):
            stack.enter_context(mock.patch.object(PROMPT, "pick_tiling", return_value=PROMPT.Tiling(*tiling)))
        elif tiling is not None:
            stack.enter_context(mock.patch.object(GROUPED, "torch_groups", return_value=False))
            for space in (GROUPED, FUSED):
                stack.enter_context(mock.patch.object(space, "pick_tiling", return_value=GROUPED.Tiling(*tiling)))
        yield


def forms(case: Case, sweep: bool) -> Iterator[tuple[str, Run, Sequence[int] | None]]:
    """Label, function and tiling of everything that is timed."""
    ours: dict[str, Run] = {"fused": functools.partial(fused, case)}
    if not case.clamped:
        ours["parts"] = functools.partial(by_parts, case)
    average = case.tokens * case.chosen / case.experts
    for label, run in ours.items():
        yield label, run, None
        of_prompts = label == "fused" and average > GROUPED.FEW_ROWS
        for tiling in (PROMPT_TILINGS if of_prompts else TILINGS) if sweep else ():
            if of_prompts or (tiling[0] <= max(16, 2 * average) and (average <= 64 or tiling[0] > 16)):
                yield f"{label} {'x'.join(map(str, tiling))}", run, tiling


def error_of(case: Case, run: Run, arguments: Arguments) -> float:
    expected = exact(case, *arguments)
    return float((run(*arguments).float() - expected).norm() / expected.norm())


def measure(case: Case, sweep: bool) -> dict[str, Any]:
    """All forms of a case, checked and timed; prints its lines."""
    sets = argument_sets(functools.partial(case.make, "cuda"))
    used = sum(x[3][0].nbytes + x[-2 if case.clamped else -1][0].nbytes for x in sets[:1]) * len(sets[0][1].unique())
    torch.compiler.reset()
    theirs = torch.compile(functools.partial(by_torch, case), dynamic=False)
    times: dict[str, float] = {}
    for label, run, tiling in (("torch", theirs, None), *forms(case, sweep)):
        with tiled(tiling):
            try:
                error = error_of(case, run, sets[0])
            except ct.TileError as problem:
                print(f"{case!s:30} {label:24} refused: {str(problem).splitlines()[0][:80]}", flush=True)
                continue
            if not error < TOLERANCE:
                raise SystemExit(f"error: {case}, {label}: relative error {error:.2e}")
            times[label] = median_time([functools.partial(run, *a) for a in sets], rounds=9).microseconds
        print(f"{case!s:30} {label:24} error {error:.1e} {times[label]:9.1f} us {used / times[label] / 1e3:6.0f} GB/s "
              f"{times['torch'] / times[label]:5.2f}x", flush=True)  # fmt: skip
    return {"case": asdict(case), "bytes": used, "microseconds": times}


def run_once(wanted: Sequence[Case], part: str, sweep: bool) -> None:
    """Run a share of all forms, only to fill the compiler's cache on disk."""
    index, count = map(int, part.split("/"))
    jobs = [(case, form) for case in wanted for form in forms(case, sweep)]
    with ct.compiler_timeout(COMPILE_LIMIT):
        for case, (_, run, tiling) in jobs[index::count]:
            with tiled(tiling):
                run(*case.make("cuda"))


def dry_run(case: Case) -> None:
    """Every form interpreted at a small size."""
    small = Case(case.name, 4, 2, 48, 32, case.clamped, 5 if case.tokens <= 32 else 80)
    for label, run, tiling in forms(small, True):
        torch.manual_seed(0)
        with tiled(tiling):
            print(f"{case!s:30} {label:24} error {error_of(small, run, small.make('cpu')):.1e}", flush=True)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = one_by_one.parser("Routed experts beside torch's grouped product.")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 2048])
    parser.add_argument("--sweep", action="store_true", help="other tilings of the products too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    wanted = [Case(name, *MODELS[name], tokens) for tokens in options.tokens for name in options.only]
    timed, compiled = (functools.partial(f, sweep=options.sweep) for f in (measure, run_once))
    shown = [case for case in wanted if case.tokens in (options.tokens[0], options.tokens[-1])]
    return one_by_one.run(__file__, arguments, options, wanted, timed, compiled, dry_run, WARM_LIMIT, shown=shown)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
