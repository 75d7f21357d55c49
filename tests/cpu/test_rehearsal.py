"""Launches of a rewritten model are known before it runs, and compiled beside one another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from cuda.tile import compilation
from small_models import small

from tilegym_fx import inventory, kernelize, rehearsal, verify
from tilegym_fx.compile import ahead, describe, signature
from tilegym_fx.doctor import find_tool
from tilegym_fx.live import _cache_of
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
    calls = list(rehearsal.language_calls(model, ids, _cache_of))
    found = rehearsal.launches(model, iter(calls[:-1]))
    assert real
    assert {kind(launch) for launch in found} == {kind(launch) for launch in real}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_long_prompt_is_rehearsed_as_far_as_the_model_has_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kernelize(small("gpt2", torch.float32), verify=False)
    ids = verify.sample_inputs(model)["input_ids"]
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    found = rehearsal.launches(model, iter(list(rehearsal.language_calls(model, ids, _cache_of))[-1:]))
    lengths = {n for launch in found for arg in launch.args if isinstance(arg, torch.Tensor) for n in arg.shape}
    assert model.config.n_positions in lengths


def test_a_call_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")
    model = kernelize(small("meta-llama/Llama-3.1-8B", torch.float32), verify=False)
    ids = torch.zeros(1, 4, dtype=torch.long)

    def calls() -> Iterator[rehearsal.Call]:
        yield lambda: model(input_ids=ids, past_key_values=3)
        yield lambda: model(input_ids=ids) and None

    assert rehearsal.launches(model, calls())
    assert model.training is False


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


def test_one_processor_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: {0, 1})
    with ahead.Compilers() as compilers:
        assert not compilers._children
        assert compilers.compile(some_launches(), "sm_90") == 0


def test_off_a_gpu_nothing_is_compiled() -> None:
    with rehearsal.compilers(small("gpt2", torch.float32), "text") as compile_kernels:
        compile_kernels(iter([lambda: pytest.fail("called")]))
