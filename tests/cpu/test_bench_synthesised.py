"""The benchmark of synthesised kernels: every region has its row, whatever becomes of it or of its process."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import linecache
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch
from repository import ROOT

from tilegym_fx.compile import compile_kernel
from tilegym_fx.doctor import find_tool
from tilegym_fx.recording import recorded

REGIONS = {path.stem: path for path in sorted((ROOT / "tests" / "support" / "regions").glob("*.json"))}
SMALL = "gemma3_rms_norm_to_add"
#: No kernel can be written for it.
REFUSED = "gpt_oss_attention_mul_add_cat"
ELF = b"\x7fELF"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_synthesised")


@pytest.fixture
def on_gpu(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as it goes on a GPU, on stand-ins: the interpreter, a reference that is not compiled, two sets."""
    compare = bench.difference
    monkeypatch.setattr(bench, "DEVICE", "cuda")
    monkeypatch.setattr(bench, "difference", lambda *values, device: compare(*values))
    monkeypatch.setattr(bench, "random_tensor", lambda shape, dtype: torch.randn(shape).to(dtype))
    monkeypatch.setattr(bench, "argument_sets", lambda make: [make(), make()])
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: run)
    return bench


def changed(folder: Path, name: str, first_line: str) -> Path:
    """The small region under another name, with a reference that begins with one more line."""
    record = json.loads(REGIONS[SMALL].read_text())
    record |= {"name": name, "reference": f"{first_line}\n{record['reference']}"}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record))
    return path


def rows_of(bench: Any, files: list[Path], jobs: int, seconds: float = 300) -> dict[str, dict[str, Any]]:
    found = list(bench.timed_together(files, jobs, time.monotonic() + seconds))
    assert len({row["name"] for row in found}) == len(found)
    return {row["name"]: row for row in found}


def test_a_prepared_kernel_can_still_be_compiled(on_gpu: Any, tmp_path: Path) -> None:
    """On a GPU a kernel is compiled at its first launch with such arguments, from its file."""
    made = on_gpu.prepare(REGIONS[SMALL], str(tmp_path))
    assert isinstance(made, on_gpu.Prepared), made
    gc.collect()
    linecache.clearcache()
    entry = made.ours[0].func
    kernels = [v for v in vars(sys.modules[entry.__module__]).values() if isinstance(v, ct.kernel)]
    assert kernels
    for kernel in kernels:
        assert f"def {kernel._pyfunc.__name__}(" in inspect.getsource(kernel._pyfunc)
    if find_tool("tileiras") is None:
        pytest.skip("no tileiras to compile with")
    with recorded() as launches:
        entry(*(value.to("meta") for value in made.ours[0].args))
    assert [compile_kernel(one.kernel, one.args, "sm_90")[:4] for one in launches] == [ELF]


def test_a_region_is_timed_beside_the_compiled_reference(on_gpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    made = on_gpu.prepare(REGIONS[SMALL], str(tmp_path))
    ours, compiled = made.ours, made.compiled
    assert all(torch.equal(one(), two()) for one, two in zip(ours, compiled, strict=True))
    times = {id(ours): 2e-6, id(compiled): 3e-6}
    monkeypatch.setattr(on_gpu, "median_time", lambda calls: on_gpu_timing(times[id(calls)]))
    row = on_gpu.timed(made)
    assert (row["outcome"], row["ours"], row["compiled"], row["ratio"]) == ("timed", "2.00", "3.00", "1.500")


def on_gpu_timing(seconds: float) -> Any:
    from tilegym_fx.bench.timing import Timing

    return Timing(seconds, seconds, seconds)


def test_a_wrong_kernel_is_not_timed(on_gpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(on_gpu, "agree", lambda wanted, got: False)
    row = on_gpu.prepare(REGIONS[SMALL], str(tmp_path))
    assert (row["outcome"], row["note"]) == ("wrong", "differs from its reference at {'H': 2560}")


def test_a_region_that_crashes_takes_no_other_with_it(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    raises = changed(tmp_path, "raises", "raise OSError('no such thing\\nand more')")
    ends = changed(tmp_path, "ends", "import os; os._exit(3)")
    after = changed(tmp_path, "after", "import torch")
    not_json = tmp_path / "not_json.json"
    not_json.write_text("{")
    # Shares of two processes: raises, not_json and the small one; the refused one, ends and after.
    files = [raises, REGIONS[REFUSED], not_json, ends, REGIONS[SMALL], after]
    rows = rows_of(bench, files, jobs=2)
    assert rows.keys() == {file.stem for file in files}
    assert rows["raises"]["note"] == "crash: OSError: no such thing"
    assert rows["not_json"]["note"].startswith("crash: JSONDecodeError: ")
    assert rows[SMALL]["outcome"] == "right"
    assert rows[REFUSED]["outcome"] == "refused"
    assert {rows[name]["note"] for name in ("ends", "after")} == {"crash: its process ended with status 3 at ends"}
    assert bench.summary(list(rows.values()), len(files)) == (
        "0 of 6 regions right and timed, 4 crashed, 1 refused, 1 right; geometric mean unknown"
    )
    assert list(temporary.iterdir()) == []


def test_a_region_for_which_there_is_no_time_says_so(bench: Any) -> None:
    rows = rows_of(bench, [REGIONS[SMALL]], jobs=1, seconds=0.1)
    assert (rows[SMALL]["outcome"], rows[SMALL]["note"]) == ("out of time", "no time: its process was at no region yet")


def test_what_timing_raises_is_told_too(bench: Any) -> None:
    def fail() -> Any:
        raise RuntimeError("")

    assert bench.survived("x", fail) == bench.new_row("x", "crashed", "crash: RuntimeError: ")


def test_the_summary_counts_each_outcome_and_takes_the_mean_of_what_is_timed(bench: Any) -> None:
    timed = [{**bench.new_row(name, "timed"), "ratio": ratio} for name, ratio in (("a", "0.500"), ("b", "8.000"))]
    rows = [*timed, bench.new_row("c", "wrong"), bench.new_row("d", "crashed"), bench.new_row("e", "crashed")]
    assert bench.summary(rows, 5) == (
        "2 of 5 regions right and timed, 2 crashed, 1 wrong; geometric mean 2.000x of torch.compile"
    )


@pytest.mark.slow
def test_the_thirty_are_right_and_compile_at_the_sizes_that_are_timed(bench: Any) -> None:
    rows = rows_of(bench, list(REGIONS.values()), jobs=2)
    assert rows.keys() == REGIONS.keys()
    assert {name for name, row in rows.items() if not row["note"].startswith("right; compiles")} == {REFUSED}
