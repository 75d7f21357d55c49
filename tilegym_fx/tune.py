"""``python -m tilegym_fx.tune MODEL``: measure the kernels' configurations at its shapes, and keep the best.

A kernel takes part when its file asks ``tuning.best`` for a configuration and lists what can be answered:

    CANDIDATES = {"linear": ({"features": 64, "depth": 128}, ...)}    # or a function of the shape class

Every candidate is compiled first, side by side in processes of their own and with a time limit, then run
against the reference, then timed with arguments that are not in the cache. What fails on the way is left out
and remembered.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from tilegym_fx import tuning
from tilegym_fx.bench.cases import parse_cases
from tilegym_fx.bench.timing import argument_sets, median_time
from tilegym_fx.cost import device_of, get_device
from tilegym_fx.errors import KernelError, TilegymFxError, UsageError
from tilegym_fx.inventory import load
from tilegym_fx.plan import Policy
from tilegym_fx.survey import survey, versions

if TYPE_CHECKING:
    from tilegym_fx.inventory import Inventory

_DEFAULT_CASES = ("prefill:1x2048", "decode:1@2048,8@2048")
#: A candidate has to be this much faster than the kernel's own choice: less is noise.
_WORTH = 0.98
#: Largest relative error, as a norm, against the reference in the same dtype.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: str) -> torch.Tensor:
        """A tensor of this form: normal random numbers, all true, or zeros where it holds integers."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point:
            return tensor.normal_()
        return tensor.fill_(self.dtype == torch.bool)


@dataclass(frozen=True)
class OpCall:
    """A Definition as a model calls it."""

    definition: str
    solution: str
    arguments: tuple[TensorSpec | bool | int | float | None, ...]

    def make(self, device: str) -> tuple[Any, ...]:
        """Fresh arguments on a device."""
        return tuple(a.make(device) if isinstance(a, TensorSpec) else a for a in self.arguments)

    def __str__(self) -> str:
        shapes = ["x".join(map(str, a.shape)) for a in self.arguments if isinstance(a, TensorSpec)]
        return f"{self.definition}({', '.join(shapes)})"


def calls_of(model: str, inventory: Inventory, policy: Policy, phases: Iterable[str], *,
             trust_remote_code: bool = False) -> list[OpCall]:  # fmt: skip
    """Every different call of a Definition that the pass puts into a model, the same call once.

    Args:
        model: Whatever ``scan`` takes.
        inventory: Whose kernels to use.
        policy: Device and which Definitions.
        phases: As ``bench`` takes them; a generation has none of its own.
        trust_remote_code: Whether code that comes with the configuration may run.
    """
    found: dict[OpCall, None] = {}
    for case in parse_cases(phases):
        if case.kind == "generate":
            raise UsageError(f"{case} is a whole generation", advice="Give prefill:BxS and decode:B@C")
        phase = survey(model, inventory, policy, batch=case.batch, seq=case.tokens, phases=(case.kind,),
                       trust_remote_code=trust_remote_code).phases[0]  # fmt: skip
        for planned in phase.outcome.chosen if phase.outcome else ():
            if planned.solution is not None:
                arguments = tuple(_spec(value) for value in planned.match.inputs.values())
                found[OpCall(planned.match.definition, planned.solution, arguments)] = None
    return list(found)


def _spec(value: Any) -> Any:
    if not isinstance(value, Node):
        return value
    tensor = value.meta["val"]
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def questions(entry: Callable[..., Any], call: OpCall, device: str, arch: str) -> list[tuning.Key]:
    """What the kernel's wrapper asks the tuning cache for when it is called like this."""
    with tuning.recording(arch) as asked:
        entry(*call.make(device))
    return list(asked)


def candidates(entry: Callable[..., Any], key: tuning.Key) -> tuple[tuning.Config, ...]:
    """The configurations that the kernel's file lists for this question."""
    listed = entry.__globals__.get("CANDIDATES", {}).get(key[0], ())
    return tuple(listed(key[1]) if callable(listed) else listed)


@dataclass(frozen=True)
class Trial:
    """A candidate's time, or why it is disabled."""

    config: tuning.Config
    seconds: float | None
    why: str = ""


def entry_for(key: tuning.Key, default: float, trials: Sequence[Trial]) -> tuning.Entry:
    """The entry that these measurements make.

    Args:
        key: The question.
        default: Seconds with the wrapper's own choice.
        trials: Of the candidates.
    """
    timed = [(t.seconds, t.config) for t in trials if t.seconds is not None]
    seconds, config = min(timed, key=lambda pair: pair[0], default=(default, None))
    if seconds > _WORTH * default:
        seconds, config = default, None
    disabled = tuple((t.config, t.why) for t in trials if t.seconds is None)
    dtype = str(key[2]).removeprefix("torch.")
    return tuning.Entry(key[0], key[1], dtype, config, round(1e6 * seconds, 3), round(1e6 * default, 3), disabled)


class Tuner:
    """Measures candidates on a device.

    Args:
        inventory: Whose kernels to use.
        device: ``cuda``.
        arch: Of the device.
        limit: Seconds that a compilation may take.
        clock: Seconds of a call, given several calls on different arguments.
        precompile: Compiles a call under a forced answer; raises KernelError.
    """

    def __init__(self, inventory: Inventory, device: str, arch: str, limit: float, *,
                 clock: Callable[[Sequence[Callable[[], object]]], float] | None = None,
                 precompile: Callable[..., None] | None = None) -> None:  # fmt: skip
        self._inventory, self._device, self._arch, self._limit = inventory, device, arch, limit
        self._clock = clock or (lambda calls: median_time(calls).median)
        self._precompile = precompile or compile_apart
        self._answered: set[tuning.Key] = set()

    def tune(self, call: OpCall) -> Iterator[tuning.Entry]:
        """An entry for each new question that the wrapper asks and its file has candidates for.

        Raises:
            KernelError: The kernel does not run as it is.
        """
        entry = self._inventory.entry_point(call.solution)
        for key in questions(entry, call, self._device, self._arch):
            listed = candidates(entry, key)
            if listed and key not in self._answered:
                self._answered.add(key)
                yield self._entry(entry, call, key, listed)

    def _entry(self, entry: Callable[..., Any], call: OpCall, key: tuning.Key,
               listed: Sequence[tuning.Config]) -> tuning.Entry:  # fmt: skip
        sets = argument_sets(lambda: call.make(self._device)) if self._device == "cuda" else [call.make(self._device)]
        expected = self._inventory.reference(call.definition)(*sets[0])
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
            problems = list(pool.map(functools.partial(self._problem, entry, call, key), listed))
        trials = [
            Trial(config, None, problem) if problem else self._trial(entry, key, config, sets, expected)
            for config, problem in zip(listed, problems, strict=True)
        ]
        with tuning.recording(self._arch):
            default = self._clock([functools.partial(entry, *arguments) for arguments in sets])
        return entry_for(key, default, trials)

    def _problem(self, entry: Callable[..., Any], call: OpCall, key: tuning.Key, config: tuning.Config) -> str:
        try:
            self._precompile(entry, call, key, config, self._arch, self._limit)
        except KernelError as error:
            return str(error)
        return ""

    def _trial(self, entry: Callable[..., Any], key: tuning.Key, config: tuning.Config,
               sets: Sequence[tuple[Any, ...]], expected: Any) -> Trial:  # fmt: skip
        with tuning.recording(self._arch, {key: config}):
            try:
                error = relative_error(entry(*sets[0]), expected)
                if not error <= _tolerance(expected):
                    return Trial(config, None, f"off by {error:.3g}")
                return Trial(config, self._clock([functools.partial(entry, *arguments) for arguments in sets]))
            except (KernelError, RuntimeError) as problem:
                return Trial(config, None, str(problem).splitlines()[0])


#: What is forced on a wrapper is forced in the whole process.
_one_at_a_time = threading.Lock()


def compile_apart(entry: Callable[..., Any], call: OpCall, key: tuning.Key, config: tuning.Config, arch: str,
                  limit: float) -> None:  # fmt: skip
    """Compile all launches of a call under one answer, each in a process of its own.

    Raises:
        CompileError: One does not compile, crashes the compiler, or takes longer than ``limit`` seconds.
    """
    from tilegym_fx.compile import compile_kernel
    from tilegym_fx.recording import recorded

    with _one_at_a_time, tuning.recording(tuning.NO_GPU, {key: config}), recorded() as launches:
        entry(*call.make("meta"))
    for launch in launches:
        compile_kernel(launch.kernel, launch.args, arch, timeout=limit, isolated=True)


def relative_error(output: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected, the worst of several outputs."""
    pairs = zip(_tensors(output), _tensors(expected), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)) for a, b in pairs)


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _tolerance(expected: Any) -> float:
    return max(_TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE) for tensor in _tensors(expected))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("python -m tilegym_fx.tune", description=(__doc__ or "").splitlines()[0])
    p.add_argument("model", metavar="MODEL", help="whatever scan takes: its shapes are tuned")
    p.add_argument("--phases", nargs="+", metavar="PHASE", default=list(_DEFAULT_CASES),
                   help=f"calls of the model (default: {' '.join(_DEFAULT_CASES)})")  # fmt: skip
    p.add_argument("--only", action="append", metavar="DEFINITION", help="tune these Definitions only")
    p.add_argument("--limit", type=float, default=60, metavar="S", help="seconds that a compilation may take")
    p.add_argument("--budget", type=float, default=600, metavar="S", help="begin nothing new after so many seconds")
    p.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: this machine's cache)")
    p.add_argument("--list", action="store_true", help="list the calls; measure nothing, needs no GPU")
    p.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the configuration")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return _tune(args)
    except TilegymFxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _tune(args: argparse.Namespace) -> int:
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.list:
        raise UsageError("there is no CUDA device to tune on", advice="Run it on a GPU machine, or with --list")
    inventory = load()
    device = device_of(torch.device("cuda", torch.cuda.current_device())) if on_gpu else get_device("h200")
    calls = calls_of(args.model, inventory, Policy(device, args.only), args.phases,
                     trust_remote_code=args.trust_remote_code)  # fmt: skip
    if args.list:
        for call in calls:
            names = ", ".join(sorted(inventory.entry_point(call.solution).__globals__.get("CANDIDATES", {})))
            print(f"{call}: {f'tunable: {names}' if names else 'its file lists no CANDIDATES'}")
        return 0
    return _measure(args, inventory, calls)


def _measure(args: argparse.Namespace, inventory: Inventory, calls: Sequence[OpCall]) -> int:
    started = time.perf_counter()
    arch = tuning.arch_of(torch.device("cuda", torch.cuda.current_device()))
    file = args.out or tuning.user_file(arch)
    about = {"device": torch.cuda.get_device_name(), "versions": versions()}
    tuner = Tuner(inventory, "cuda", arch, args.limit)
    count = 0
    for call in calls:
        if time.perf_counter() - started > args.budget:
            print(f"out of time before {call}", file=sys.stderr)
            break
        try:
            for entry in tuner.tune(call):
                tuning.save(file, arch, about, [entry])
                print(_line(call, entry), flush=True)
                count += 1
        except KernelError as error:
            print(f"{call}: {error}", file=sys.stderr)
    tuning.forget()
    print(f"{count} entries in {file}" if count else "no kernel of this model lists CANDIDATES", file=sys.stderr)
    return 0


def _line(call: OpCall, entry: tuning.Entry) -> str:
    change = f"{entry.config}, {entry.default_microseconds:.1f} -> {entry.microseconds:.1f} us"
    kept = f"its own choice stays, {entry.default_microseconds:.1f} us"
    disabled = f"; {len(entry.disabled)} disabled" if entry.disabled else ""
    return f"{call}: {entry.kernel} {entry.shape_class}: {change if entry.config else kept}{disabled}"


if __name__ == "__main__":
    sys.exit(main())
