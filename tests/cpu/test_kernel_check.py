"""The judge of kernels tells a right one from one that is wrong in a single way."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch

from tilegym_fx.closeness import error_ratio
from tilegym_fx.errors import KernelError
from tilegym_fx.inventory import load
from tilegym_fx.kernel_check import (
    compile_faults,
    difference,
    disagreements,
    finds,
    random_inputs,
    sizes_to_try,
)
from tilegym_fx.kernel_source import cut_out

INVENTORY = load()
RUN = INVENTORY.reference("silu_mul")
INPUTS = random_inputs(INVENTORY.definitions["silu_mul"])


def test_a_reference_agrees_with_itself() -> None:
    assert difference(RUN, RUN, INPUTS) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda gate, up: RUN(gate, up) * 1.05, "off by"),
        (lambda gate, up: RUN(gate, up).float(), "torch.float32, not torch.bfloat16"),
        (lambda gate, up: RUN(gate, up)[:-1], "has shape"),
        (lambda gate, up: (RUN(gate, up), up), "gives 2 values"),
        (lambda gate, up: RUN(gate, up).t().contiguous().t(), "not contiguous"),
        (lambda gate, up: RUN(gate, up.zero_()), "writes to its input 'up'"),
        (lambda gate, up: 1 / 0, "ZeroDivisionError"),
        (lambda gate, up: torch.where(gate > 1.0, torch.nan, RUN(gate, up)), "off by inf"),
    ],
)
def test_one_wrong_thing_is_named(wrong: Callable[..., object], message: str) -> None:
    inputs = {name: value.clone() for name, value in INPUTS.items()}
    inputs["gate"][0, 0] = 2.0
    assert any(message in problem for problem in difference(RUN, wrong, inputs))


def test_rounding_is_forgiven_and_a_little_more_is_not() -> None:
    right = torch.randn(64, 64).bfloat16()
    ulp = torch.finfo(torch.bfloat16).eps
    assert error_ratio(right, (right.float() * (1 + ulp)).bfloat16()) < 1
    assert error_ratio(right, (right.float() * (1 + 16 * ulp)).bfloat16()) > 1
    assert error_ratio(right, right + math.inf) == math.inf


def test_sizes_are_odd_alike_and_of_several_tiles() -> None:
    tried = list(sizes_to_try(INVENTORY.definitions["rms_norm"]))
    assert any(sizes["N"] == sizes["H"] for sizes in tried)
    assert any(sizes["H"] % 2 for sizes in tried)
    assert max(sizes["H"] for sizes in tried) > 100


def test_a_shipped_kernel_agrees() -> None:
    assert disagreements(INVENTORY, "gelu_mul") == []


def test_the_pass_finds_a_definition_in_code_and_not_in_other_code() -> None:
    assert finds(INVENTORY, "silu_mul", lambda gate, up: up * torch.nn.functional.silu(gate))
    assert not finds(INVENTORY, "silu_mul", lambda gate, up: up * torch.nn.functional.relu(gate))


def test_a_kernel_cut_out_of_its_file_has_what_it_needs_and_no_more() -> None:
    text = cut_out(INVENTORY.source_texts("rms_norm")["kernels/norm.py"], "rms_norm", "mine", "Cut out.")
    assert text.startswith('"""Cut out."""')
    assert "def mine(" in text
    assert "def rms_norm_kernel(" in text
    assert "layer_norm" not in text
    assert "from itertools import pairwise" in text
    compile(text, "cut_out", "exec")


def test_without_a_compiler_the_advice_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilegym_fx.compile", None)
    with pytest.raises(KernelError, match=r"no kernel can be compiled here: .* Install cuTile: "):
        compile_faults(INVENTORY, "silu_mul")


@pytest.mark.parametrize("sizes", [{"N": 3, "I": 4544}, {"N": 3, "I": 8}])
def test_a_kernel_is_compiled_for_the_sizes_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    seen = []
    monkeypatch.setattr("tilegym_fx.compile.compile_kernel", lambda kernel, args, arch, **_: seen.append((args, arch)))
    assert compile_faults(INVENTORY, "silu_mul", ["sm_90"], sizes=sizes) == []
    [(arguments, arch)] = seen
    assert (arguments[0].numel(), arch) == (math.prod(sizes.values()), "sm_90")
