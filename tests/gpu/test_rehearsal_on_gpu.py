"""On a GPU: what is compiled before a model runs is what its launches would have compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda.tile import compilation

from tilegym_fx import inventory
from tilegym_fx.compile import describe, signature
from tilegym_fx.compile.ahead import symbol_of
from tilegym_fx.recording import recorded

pytestmark = pytest.mark.gpu

#: Kernelizes a model and runs a long prompt, and prints the files that this process itself gave the compiler.
SCRIPT = """
import pathlib, sys, torch
sys.path.insert(0, {support!r})
import cuda.tile._compile as compiler
from small_models import small
from tilegym_fx import kernelize, report
from tilegym_fx.rehearsal import PROMPT
calls, compile_cubin = [], compiler.compile_cubin
def noted(file, *args, **kwargs):
    calls.append(pathlib.Path(file).name)
    return compile_cubin(file, *args, **kwargs)
compiler.compile_cubin = noted
model = kernelize(small({name!r}, torch.bfloat16).to("cuda"), strict=True)
assert all(check.passed for check in report(model).checks)
print("kernelize", *calls)
calls.clear()
with torch.inference_mode():
    model(torch.zeros(1, PROMPT, dtype=torch.long, device="cuda"), use_cache=True)
print("prompt", *calls)
"""


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"])
def test_no_launch_of_a_verification_compiles(name: str, tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    folders = {key: str(tmp_path / key) for key in ("CUDA_TILE_CACHE_DIR", "TILEGYM_FX_CACHE")}
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(support=support, name=name)], check=True, text=True,
                          stdout=subprocess.PIPE, env={**os.environ, **folders})  # fmt: skip
    assert done.stdout.splitlines() == ["kernelize", "prompt"]
    assert list((tmp_path / "TILEGYM_FX_CACHE" / "compiled").iterdir())


LAYOUTS = {
    "one row": ((1, 64), (64, 1), 0), "many": ((12, 64), (64, 1), 0), "sixteen": ((16, 64), (64, 1), 0),
    "a slice": ((12, 64), (200, 1), 64), "unaligned": ((12, 64), (201, 1), 3), "expanded": ((12, 64), (0, 1), 0),
    "batched": ((2, 3, 64), (192, 64, 1), 0), "a length of one": ((2, 1, 64), (100, 7, 1), 0),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_without_memory_is_assumed_to_be_what_it_would_be_with_it(layout: str) -> None:
    memory = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
    with recorded() as launches:
        inventory.load().entry_point("rms_norm")(memory.as_strided(*LAYOUTS[layout]), memory[:64], 1e-6)
    (launch,) = launches
    convention = compilation.CallingConvention.cutile_python_v2()
    real = compilation.KernelSignature.from_kernel_args(launch.kernel, launch.args, convention)
    assert compilation.demangle_kernel_name(symbol_of(launch))[1].parameters == real.parameters
    assert signature(describe(launch.kernel, launch.args)).parameters == real.parameters
