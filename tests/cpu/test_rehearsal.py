"""Launches of a rewritten model are known before it runs, and compiled beside one another."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch
from cuda.tile import compilation
from small_models import small
from torch import nn
from transformers import DynamicCache

from tilegym_fx import inventory, kernelize, live, rehearsal, verify
from tilegym_fx.compile import ahead, describe, signature
from tilegym_fx.doctor import find_tool
from tilegym_fx.export import run_without_memory
from tilegym_fx.live import _cache_of, _calls
from tilegym_fx.recording import Launch, recorded

needs_compiler = pytest.mark.skipif(find_tool("tileiras") is None, reason="tileiras is not installed")


@ct.kernel
def broken_kernel(x, y):
    ct.store(y, (0,), ct.load(x, (0,), shape=(3,)))  # no power of two


def kind(launch: Launch) -> str:
    """What a kernel is compiled for."""
    args = [ahead._described(arg) for arg in launch.args]
    lengths = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
    return repr((id(launch.kernel), launch.grid, lengths, describe(launch.kernel, args)))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "google/gemma-3-4b-it (text)", "gpt2"])
def test_what_is_rehearsed_is_what_a_verification_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    model = kernelize(small(name, torch.float32), verify=False)
    ids = verify.sample_inputs(model, batch=2)["input_ids"]
    with recorded() as real:
        verify.run_language_model(model, {"input_ids": ids}, _cache_of)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = rehearsal.launches(model, rehearsal.language_calls(model, ids, _cache_of)[:-1])
    assert real
    assert {kind(launch) for launch in found} == {kind(launch) for launch in real}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_long_prompt_is_rehearsed_as_far_as_the_model_has_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kernelize(small("gpt2", torch.float32), verify=False)
    ids = verify.sample_inputs(model)["input_ids"]
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    found = rehearsal.launches(model, rehearsal.language_calls(model, ids, _cache_of)[-1:])
    lengths = {n for launch in found for arg in launch.args if isinstance(arg, torch.Tensor) for n in arg.shape}
    assert model.config.n_positions in lengths


class Odd(Exception):
    """Nothing that a model's code is known to raise."""


def raise_odd(model: nn.Module) -> None:
    raise Odd


def test_a_call_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    model = kernelize(small("meta-llama/Llama-3.1-8B", torch.float32), verify=False).train()
    ids = torch.zeros(1, 4, dtype=torch.long)
    calls = [lambda model: model(input_ids=ids, past_key_values=3), raise_odd, lambda model: model(input_ids=ids)]
    assert rehearsal.launches(model, calls)
    assert model.training


def test_a_model_that_cannot_be_copied_is_not_rehearsed() -> None:
    model = small("gpt2", torch.float32)
    model.lock = threading.Lock()  # no copy of it can be made
    assert rehearsal.launches(model, [lambda model: pytest.fail("called")]) == []


def test_a_call_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    monkeypatch.setattr(rehearsal, "BUDGET", 0.0)
    model = kernelize(small("gpt2", torch.float32), verify=False)
    ids = verify.sample_inputs(model)["input_ids"]
    assert rehearsal.launches(model, rehearsal.language_calls(model, ids, _cache_of)) == []


class Remembers(nn.Module):
    """Counts its calls in place, in a buffer and in a tensor that is none; keeps what it made; changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.register_buffer("count", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.seen: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.plain.add_(1)
        y = self.norm(x)
        self.seen[x.shape[0]] = y
        x.mul_(2)
        return y


def test_nothing_of_a_rehearsal_is_remembered() -> None:
    model, x = Remembers(), torch.ones(4, 64)
    calls = _calls(model, (x,))
    rehearsal.launches(model, [*calls, lambda model: model(torch.ones(7, 64))])
    assert model.seen == {}
    assert torch.equal(model.count, torch.zeros(2))
    assert torch.equal(model.plain, torch.zeros(2))
    assert torch.equal(x, torch.ones(4, 64))


def test_running_without_memory_puts_numbers_back() -> None:
    model = Remembers()
    model.register_buffer("wide", torch.arange(4.0).expand(3, 4))
    run_without_memory(model, (torch.ones(4, 64),), {})
    assert torch.equal(model.count, torch.zeros(2))
    assert torch.equal(model.plain, torch.zeros(2))


def test_a_cache_among_the_inputs_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rehearsal of every model, as on a GPU."""

    @contextmanager
    def compilers(model: nn.Module, text: str) -> Iterator[Callable[[Any], None]]:
        yield lambda calls: found.extend(rehearsal.launches(model, calls))

    found: list[Launch] = []
    monkeypatch.setattr(live, "compilers", compilers)
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    model = small("meta-llama/Llama-3.1-8B", torch.float32)
    ids, cache = torch.zeros(1, 4, dtype=torch.long), DynamicCache(config=model.config)
    kernelize(model, inputs={"input_ids": ids, "past_key_values": cache, "use_cache": True}, strict=True)
    assert found
    assert cache.get_seq_length() == 0


def some_launches() -> list[Launch]:
    """Of two kernels, one of them for two kinds of arguments."""
    entry, add = (inventory.load().entry_point(name) for name in ("rms_norm", "add_rms_norm"))
    x, weight = torch.empty(12, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, device="meta")
    with recorded() as launches:
        entry(x, weight.bfloat16(), 1e-6)
        entry(x, weight.bfloat16(), 1e-6)
        entry(x.float(), weight, 1e-6)
        add(x, x, weight.bfloat16(), 1e-6)
    return launches


def own_symbol(launch: Launch) -> str:
    """A name as `symbol_of` gives it where there is a driver."""
    name = launch.kernel._pyfunc.__name__
    return str(signature(describe(launch.kernel, launch.args)).with_mangled_symbol(name).symbol)


@pytest.fixture
def no_driver_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(ahead, "symbol_of", own_symbol)
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cutile"))
    return tmp_path / "cutile"


def test_each_kind_of_launch_is_asked_for_once(no_driver_asked: Path) -> None:
    asked = ahead.requests(some_launches(), "sm_90")
    assert [request["name"] for request in asked] == ["rms_norm_kernel", "rms_norm_kernel", "add_rms_norm_kernel"]
    assert len({request["symbol"] for request in asked}) == 3


@needs_compiler
def test_what_is_compiled_ahead_is_found_by_a_launch(no_driver_asked: Path) -> None:
    """The compiler of this process would look at the same place: its bytecode is the same."""
    launches = some_launches()
    with ahead.Compilers(2) as compilers:
        assert compilers.compile(launches, "sm_90") == 3
    kept = sorted(file.name for file in no_driver_asked.rglob("*") if file.is_file())
    script = "import sys, test_rehearsal as t; t.compile_here(t.some_launches())"
    paths = os.pathsep.join([str(Path(__file__).parent), ahead.environment()["PYTHONPATH"]])
    subprocess.run([ahead.sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": paths})
    assert sorted(file.name for file in no_driver_asked.rglob("*") if file.is_file()) == kept


def compile_here(launches: list[Launch]) -> None:
    import io

    for launch in launches:
        name = launch.kernel._pyfunc.__name__
        found = signature(describe(launch.kernel, launch.args)).with_mangled_symbol(name)
        compilation.export_kernel(launch.kernel, [found], io.BytesIO(), gpu_code="sm_90", output_format="cubin")


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(no_driver_asked: Path) -> None:
    x = torch.empty(3, device="meta")
    with ahead.Compilers(2) as compilers:
        assert compilers.compile([Launch(broken_kernel, (1,), (x, x))] * 3, "sm_90") == 0


def test_processes_that_have_ended_leave_the_rest_to_the_launches(no_driver_asked: Path) -> None:
    with ahead.Compilers(2) as compilers:
        for child in compilers._children:
            child.kill()
            child.wait()
        assert compilers.compile(some_launches(), "sm_90") == 0


def test_a_process_that_does_not_answer_is_ended(no_driver_asked: Path) -> None:
    with ahead.Compilers(2) as compilers:
        for child in compilers._children:
            child.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert compilers.compile(some_launches(), "sm_90", limit=1) == 0
        assert time.monotonic() - started < 30


def test_what_a_process_prints_besides_is_no_answer(no_driver_asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sh", "-c", "echo hello; echo true; read line; echo compiled; read line; echo failed"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    done: list[bool] = []
    ahead._serve(child, iter([{"name": "one"}, {"name": "two"}]), threading.Lock(), done)
    assert done == [True, False]


@pytest.mark.parametrize("after", [0, 1])
def test_processes_that_cannot_be_started_are_done_without(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if len(started) == after:
            raise OSError("Cannot allocate memory")
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(ahead.subprocess, "Popen", refuse)
    with ahead.Compilers(4) as compilers:
        assert compilers._children == started
    assert all(child.poll() is not None for child in started)


def test_a_launch_of_something_strange_is_left_out(no_driver_asked: Path) -> None:
    launches = some_launches()
    strange = Launch(launches[0].kernel, (1,), ([1, 2],))
    assert len(ahead.requests([strange, *launches], "sm_90")) == 3


def test_one_processor_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0, 1})
    with ahead.Compilers() as compilers:
        assert not compilers._children
        assert compilers.compile(some_launches(), "sm_90") == 0


def test_off_a_gpu_nothing_is_compiled() -> None:
    with rehearsal.compilers(small("gpt2", torch.float32), "text") as compile_kernels:
        compile_kernels([lambda model: pytest.fail("called")])
