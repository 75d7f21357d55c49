"""One variant of a model: built, patched, and for each case prepared, judged, timed and profiled.

``python -m tilegym_fx.bench.worker`` reads a job from stdin as one line of JSON and answers in lines:
``about`` the model, then for each case ``ready``, whereupon it waits for a line, and ``result``. A case that
cannot be timed, or that differs from the original, gives a ``result`` with an error. Between cases it waits for a line
too: to prepare the next one while another worker is timed would share the GPU with it.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilegym_fx import ops, verify
from tilegym_fx.errors import TilegymFxError, VerifyError
from tilegym_fx.export.caches import masks_as_when_run
from tilegym_fx.export.trace import MODEL_ERRORS, describe

from . import patches
from .calls import ROUND, CaseCall, Decode, Generate, Prefill
from .cases import Case
from .clock import Call, Clock
from .job import Job
from .judge import judged_sequences, verdict
from .models import find_source, make_model, read_bytes
from .profile import kernel_functions, kernel_times, our_kernels
from .results import Result, Samples, as_json
from .timing import copy_rate
from .turns import Turns

#: For how long a captured prompt runs before it is timed: an H200's clock settles in half of that.
_SETTLING = 1.0
_PROFILED_CALLS = {"prefill": 2, "decode": 5, "generate": 1}

Send = Callable[[dict[str, Any]], None]
Listen = Callable[[], None]


class Worker:
    """Builds the model at once.

    Args:
        job: What to do.
        send: Takes the messages.
        listen: Returns when the worker may go on: to time what it has prepared, or to prepare its next case.
    """

    def __init__(self, job: Job, send: Send, listen: Listen) -> None:
        self._job, self._send, self._listen = job, send, listen
        self._turns = Turns(str(torch.cuda.get_device_properties(0).uuid) if job.device == "cuda" else None)
        self._turns.prepare()
        self._variant = job.parsed_variant
        self._clock = Clock(job.device)
        self._prepare: dict[str, float] = {}
        if self._variant.is_peer:
            patches.patch_process(self._variant, find_source(job).model_type)
        self._model = self._timed("build", lambda: make_model(job))
        self._is_reference = self._variant.name == "eager"
        self._wide = self._float32_copy() if self._is_reference and job.judge else None
        self._timed("patch", lambda: patches.patch_model(self._variant, self._model))
        self._forward = patches.forward_of(self._variant, self._model, tiny=job.tiny)

    def run(self) -> None:
        """Work through the cases."""
        self._send({"kind": "about", **self._about()})
        self._turns.leave()
        for i, case in enumerate(self._job.parsed_cases()):
            if i:
                self._listen()
            self._turns.prepare()
            with torch.no_grad():
                result = self._result(case)
            self._turns.leave()
            self._send(as_json(result) if result is not None else {"kind": "judged"})

    def _about(self) -> dict[str, Any]:
        weights = list(self._model.parameters())
        if self._is_reference:
            self._turns.measure()  # the copy rate
        return {
            "class": type(self._model).__name__,
            "parameters": sum(p.numel() for p in weights),
            "read_bytes": read_bytes(self._model),
            "attention": getattr(self._model.config, "_attn_implementation", None),
            "copy_rate": copy_rate() if self._clock.on_gpu and self._is_reference else None,
        }

    def _result(self, case: Case) -> Result | None:
        try:
            return self._measured(case)
        except TilegymFxError as error:
            return self._failed(case, str(error))
        except MODEL_ERRORS as error:
            return self._failed(case, describe(error))

    def _failed(self, case: Case, why: str) -> Result:
        return Result(str(case), self._variant.name, prepare=dict(self._prepare), error=why)

    def _measured(self, case: Case) -> Result | None:
        self._tidy()
        before = ops.fallbacks()
        call = self._call(self._model, self._forward, case)
        first = self._timed("first call", call)
        verdict = self._judged(case, call, first)
        if not self._job.timed:
            return None
        _warm(call)
        self._clock.wait()
        self._clock.give_back()
        self._turns.leave()
        self._send({"kind": "ready"})
        self._listen()
        self._turns.measure()
        self._clock.reset_peak()
        gpu, wall, note = self._times(call)
        peak = self._clock.peak_bytes()
        profiled = _PROFILED_CALLS[case.kind]
        call.rewind()
        trace = self._clock.trace(call, profiled, self._job.trace_file(case))
        fallbacks = {" ".join(k): n - before.get(k, 0) for k, n in ops.fallbacks().items() if n > before.get(k, 0)}
        return Result(
            str(case), self._variant.name, gpu, wall,
            kernel_times(trace, our_kernels(kernel_functions()), profiled),
            verdict, dict(self._prepare), fallbacks, peak, note,
        )  # fmt: skip

    def _tidy(self) -> None:
        """Static shapes for every case, and the memory of the last one given back."""
        torch._dynamo.reset()
        gc.collect()
        self._clock.give_back()

    def _call(self, model: nn.Module, forward: Callable[..., Any], case: Case) -> CaseCall:
        if case.kind == "generate":
            return Generate(model, patches.generation_options(self._variant, tiny=self._job.tiny), case)
        return (Prefill if case.kind == "prefill" else Decode)(model, forward, case)

    def _times(self, call: CaseCall) -> tuple[Samples | None, Samples, str]:
        """Seconds on the GPU and on the clock, and a note."""
        clock, repeats = self._clock, self._job.repeats
        if isinstance(call, Generate):
            return None, Samples(tuple(clock.wall(call, max(3, repeats // 8)))), ""
        if isinstance(call, Prefill):
            fewer = max(3, repeats // 4)
            gpu, note = self._prompt_on_gpu(call) if self._job.graphed else (None, "")
            return gpu or Samples(tuple(clock.each(call, fewer))), Samples(tuple(clock.wall(call, fewer))), note
        wall = self._steps(call, lambda: _wall_of_steps(clock, call), max(3, repeats // 8))
        gpu, note = self._step_on_gpu(call)
        return gpu, wall, note

    def _prompt_on_gpu(self, call: CaseCall) -> tuple[Samples | None, str]:
        # transformers takes a capture for a trace, and would build the masks that it skips when it is run
        is_as_written = self._variant.mode == "eager"
        with masks_as_when_run({}) if is_as_written else nullcontext():
            prompt, note = self._graph_of(call, "a prompt")
        if prompt is None:
            return None, note
        self._clock.settle(prompt, _SETTLING)
        return Samples(tuple(self._clock.each(prompt, self._job.repeats))), ""

    def _step_on_gpu(self, call: CaseCall) -> tuple[Samples | None, str]:
        step, note = self._graph_of(call, "a step")
        if step is None:
            return None, note
        rounds = -(-self._job.repeats // ROUND)
        return self._steps(call, lambda: self._clock.each(step, min(ROUND, self._job.repeats)), rounds), ""

    def _graph_of(self, call: CaseCall, what: str) -> tuple[Call | None, str]:
        """A call inside a CUDA graph, or None and why; a variant that makes such graphs itself is taken as it is."""
        if self._variant.mode == "graphs":
            return call, ""
        call.rewind()
        try:
            return self._clock.captured(call), ""
        except RuntimeError as error:
            return None, f"{what} cannot be captured into a CUDA graph: {describe(error)}"

    def _steps(self, call: CaseCall, measure: Callable[[], list[float]], rounds: int) -> Samples:
        seconds: list[float] = []
        for _ in range(rounds):
            call.rewind()
            seconds += measure()
        return Samples(tuple(seconds))

    def _judged(self, case: Case, call: CaseCall, output: torch.Tensor) -> str:
        """What was compared, in words.

        Raises:
            VerifyError: The variant does not compute what the original does.
        """
        if isinstance(call, Generate):
            gap, allowed = call.worst_gap(output)
            if not gap <= allowed:
                raise VerifyError(
                    f"{self._variant.name} in {case}: a token {gap:.3g} below the best, {allowed:.3g} allowed"
                )
            return f"every token within {gap:.3g} of the best of a pass without cache"
        file = Path(self._job.folder) / f"{case}.pt".replace(":", "-")
        logits = output.float().cpu()
        if self._is_reference:
            torch.save((logits, self._wide_logits(case)), file)
            return "the original"
        if not file.exists():
            raise VerifyError(f"the original gave no logits in {case}", advice="Nothing is timed without them")
        original, wide = torch.load(file)
        found = verdict(original, logits, wide, getattr(torch, self._job.dtype))
        if found.failed and not self._variant.is_baseline:
            raise VerifyError(f"{self._variant.name} in {case}: {found.failed}", advice="It is not timed")
        if found.failed:  # torch's own: what users have today, and what we are measured against
            return f"{found.failed}: torch.compile itself"
        return str(found)

    def _float32_copy(self) -> nn.Module | None:
        weights = sum(4 * p.numel() for p in self._model.parameters())
        if not self._clock.on_gpu or weights < torch.cuda.mem_get_info()[0] // 2:
            return copy.deepcopy(self._model).float()
        return None

    def _wide_logits(self, case: Case) -> torch.Tensor | None:
        """Those of a float32 run, of as many sequences as it has time and memory for."""
        if self._wide is None:
            return None
        count = judged_sequences(case.batch, case.tokens)
        while count:
            try:
                return self._call(self._wide, self._wide, replace(case, batch=count))().float().cpu()
            except MODEL_ERRORS as problem:
                if not verify.is_out_of_memory(problem):
                    raise
            self._clock.give_back()
            count //= 2
        return None

    def _timed(self, step: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = action()
        self._clock.wait()
        self._prepare[step] = round(time.perf_counter() - start, 3)
        return result


def _warm(call: CaseCall) -> None:
    """What is timed, before it is: a step after a full sliding window is compiled and captured in the first rounds."""
    if isinstance(call, Decode):
        for _ in range(2):
            call.rewind()
            for _ in range(ROUND):
                call()
    elif isinstance(call, Prefill):
        for _ in range(3):
            call()


def _wall_of_steps(clock: Clock, call: Call) -> list[float]:
    """Seconds of one step out of a row of them, as in a generation."""

    def row() -> None:
        for _ in range(ROUND):
            call()

    return [seconds / ROUND for seconds in clock.wall(row, 1)]


def main() -> int:
    """Answer the job on stdin; whatever libraries print goes to stderr."""
    faulthandler.register(signal.SIGUSR1)  # asked for where the time runs out
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def listen() -> None:
        if not sys.stdin.readline():
            raise SystemExit("nobody is listening any more")

    job = Job.from_json(json.loads(sys.stdin.readline()))
    try:
        Worker(job, send, listen).run()
    except TilegymFxError as error:
        send({"kind": "refused", "why": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
