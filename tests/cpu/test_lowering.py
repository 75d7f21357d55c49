"""Inductor knows our ops before it meets one, so it never writes a call's whole history into a log message."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from fresh_compiler import fresh_compiler
from torch import nn
from torch._inductor import config, graph, lowering
from torch._inductor.utils import run_and_get_code

import tilegym_fx
from tilegym_fx import backend, ops


@pytest.fixture(autouse=True)
def unknown_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op of ours is known, and that inductor makes its own of one is an error."""

    def make_fallback(op: Any, **_: Any) -> None:
        raise AssertionError(f"inductor did not know {op}")

    for op in map(ops.overload, ops.names()):
        monkeypatch.delitem(lowering.lowerings, op, raising=False)
    monkeypatch.setattr(graph, "make_fallback", make_fallback)


class Gate(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.silu(x) * y)


def run(code: Any, compiler: Any) -> None:
    fresh_compiler()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad(), config.patch(force_disable_caches=True):  # else a graph of an earlier run is taken
        torch.testing.assert_close(torch.compile(code, backend=compiler)(x, y), Gate()(x, y))


def test_the_backend_tells_inductor_beforehand() -> None:
    run(Gate(), backend.tilegym_fx_backend)
    assert ops.overload("silu_mul") in lowering.lowerings


def test_kernelize_tells_it_for_whoever_compiles_later() -> None:
    run(tilegym_fx.kernelize(Gate(), inputs=(torch.randn(3, 8), torch.randn(3, 8))), "inductor")


def test_kernelize_does_not_load_it_for_those_who_never_compile() -> None:
    script = (
        "import sys, torch, tilegym_fx\n"
        "from torch import nn\n"
        "model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(3, 8)\n"
        "tilegym_fx.kernelize(model, inputs=(x,))\n"
        "print('torch._inductor.lowering' in sys.modules)\n"
        "from torch._inductor.lowering import lowerings\n"
        "print(all(tilegym_fx.ops.overload(name) in lowerings for name in tilegym_fx.ops.names()))\n"
        "print(any(type(finder).__module__.startswith('tilegym_fx') for finder in sys.meta_path))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True", "False"]


def test_without_being_told_it_does_not_know() -> None:
    with pytest.raises(Exception, match="did not know"):
        run(lambda x, y: torch.tanh(ops.silu_mul(x, y)), "inductor")


def test_what_two_ops_read_is_computed_once() -> None:
    """Ops that ask for exact strides would each have an own copy made: every layer its own mask."""

    def code(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = torch.tanh(x)
        return ops.silu_mul(shared, y) + ops.silu_mul(shared, x)

    fresh_compiler()
    ops.lower_as_calls()
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad(), config.patch(force_disable_caches=True):
        result, texts = run_and_get_code(torch.compile(code), x, y)
        torch.testing.assert_close(result, code(x, y))
    kernels = re.findall(r"^(cpp_fused\w*) =", "\n".join(texts), re.MULTILINE)
    assert sum("tanh" in kernel for kernel in kernels) == 1, kernels
