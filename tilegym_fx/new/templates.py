"""Texts of a new kernel's files. ``{name}`` is the only thing that is filled in, unless a text says more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HARDWARE = ("SM80", "SM90", "SM100", "SM120")
DTYPES = ("float32", "float16", "bfloat16")

_REFERENCE = """\
# Source: https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/gemma2/modeling_gemma2.py#L195-L198
import torch


def run(x, cap):
    return torch.tanh(x / cap) * cap
"""

_KERNEL = '''\
"""{name} in cuTile: y = tanh(x / cap) * cap.

Tiles. The operand is one long row; a block takes {{TILE}} elements, two 16-byte loads for each of 128
threads. The last tile is gathered under a mask.
"""

from __future__ import annotations

import cuda.tile as ct
import torch

from tilegym_fx.launch import launch

#: Elements of one block.
TILE = 2048


def capped(x, cap):
    """Rounded after every operation, as the reference rounds."""
    scaled = ct.astype(ct.astype(x, ct.float32) / cap, x.dtype)
    bent = ct.astype(ct.tanh(ct.astype(scaled, ct.float32)), x.dtype)
    return ct.astype(ct.astype(bent, ct.float32) * cap, x.dtype)


@ct.kernel
def {name}_kernel(x, out, cap, WIDTH: ct.Constant[int]):
    block = ct.bid(0)
    if (block + 1) * WIDTH <= x.shape[0]:
        tile = ct.load(x, (block,), shape=(WIDTH,), check_bounds=False, allow_tma=False)
        ct.store(out, (block,), capped(tile, cap), check_bounds=False, allow_tma=False)
    else:
        columns = block * WIDTH + ct.arange(WIDTH, dtype=ct.int32)
        ct.scatter(out, columns, capped(ct.gather(x, columns), cap))


def {name}(x: torch.Tensor, cap: float) -> torch.Tensor:
    """tanh(x / cap) * cap.

    Args:
        x: any shape and strides, float32, float16 or bfloat16; the result has its dtype and is contiguous.
        cap: the result lies between -cap and cap.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if count := x.numel():
        launch({name}_kernel, (-(-count // TILE),), (x.view(-1), out.view(-1), cap, TILE))
    return out
'''

_GUARDED = """\
import torch

from tilegym_fx.spelling import guard


{guards}"""

_PATTERNS = '''\
"""Before: {before}.
After:  one {name}.
Add a spelling for each other way in which models write it, and a guard for each place where it must not go.
"""

from __future__ import annotations
'''

_TEST = '''\
"""{name}: found in code, and computed right."""

from __future__ import annotations

from pathlib import Path

import pytest{imports}

from tilegym_fx.kernel_check import compile_faults, difference, finds, inventory_with, random_inputs

INVENTORY = inventory_with(Path(__file__).resolve().parents[2])
NAME = "{name}"
SOLUTIONS = [solution.name for solution in INVENTORY.solutions_for(NAME)]


def test_it_is_found_in_its_own_reference() -> None:
    assert finds(INVENTORY, NAME)
{near_miss}

@pytest.mark.parametrize("solution", SOLUTIONS)
def test_the_kernel_computes_what_the_reference_does(solution: str) -> None:
    inputs = random_inputs(INVENTORY.definitions[NAME])
    assert difference(INVENTORY.reference(NAME), INVENTORY.entry_point(solution), inputs) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("solution", SOLUTIONS)
def test_the_kernel_compiles(solution: str, arch: str) -> None:
    assert compile_faults(INVENTORY, solution, [arch]) == []
'''

_NEAR_MISS = """

def test_another_function_is_not_it() -> None:
    assert not finds(INVENTORY, NAME, lambda x, cap: torch.sigmoid(x / cap) * cap)
"""

_BENCHMARK = '''\
"""How fast {name} is at growing sizes; `--print-data` shows it."""

from __future__ import annotations

from pathlib import Path

from tilegym_fx.kernel_bench import benchmark, check_then_time, lines, main, moved_bytes, perf_report
from tilegym_fx.kernel_check import inventory_with, random_inputs

INVENTORY = inventory_with(Path(__file__).resolve().parents[1])
NAME = "{name}"
SIZES = {sizes}


@perf_report(
    benchmark(
        x_names=["factor"],
        x_vals={factors},
        x_log=True,
        line_arg="line",
        line_vals=lines(),
        line_names=lines(),
        plot_name="{name}-GBps",
        ylabel="GB/s",
        args={{}},
    )
)
def report(factor: int, line: str) -> float:
    sizes = {{name: size * factor if name == {growing!r} else size for name, size in SIZES.items()}}
    inputs = random_inputs(INVENTORY.definitions[NAME], sizes)
    return moved_bytes(INVENTORY, NAME, inputs) / check_then_time(INVENTORY, NAME, inputs, line) / 1e9


if __name__ == "__main__":
    main(report)
'''


def definition(name: str, op_type: str) -> dict[str, Any]:
    """A Definition that works and is meant to be replaced: soft capping."""
    rows = {"shape": ["N", "H"], "dtype": "bfloat16"}
    return {
        "name": name,
        "description": "Soft cap: the hyperbolic tangent, scaled to lie between -cap and cap.",
        "op_type": op_type,
        "tags": ["stage:prefill", "stage:decode", "status:draft", "dtype:bfloat16"],
        "axes": {
            "N": {"type": "var", "description": "Flattened leading dimensions."},
            "H": {"type": "var", "description": "Columns."},
        },
        "inputs": {
            "x": {**rows, "description": "Values to cap."},
            "cap": {"shape": None, "dtype": "float32", "description": "Bound of the result."},
        },
        "outputs": {"output": {**rows, "description": "Capped values."}},
        "constraints": [],
        "reference": _REFERENCE,
    }


def solution(
    name: str,
    definition_name: str,
    description: str,
    dtypes: tuple[str, ...] = DTYPES,
    beside: Iterable[str] = (),
) -> dict[str, Any]:
    """A Solution whose kernel is ``kernels/<name>.py``, which imports from the files ``beside`` it."""
    return {
        "name": name,
        "definition": definition_name,
        "description": description,
        "author": "tilegym_fx",
        "spec": {
            "language": "cuda-tile",
            "target_hardware": list(HARDWARE),
            "entry_point": f"kernels/{name}.py::{name}",
            "dependencies": ["cuda-tile"],
        },
        "sources": [{"path": path} for path in (f"kernels/{name}.py", *beside)],
        "tags": [f"dtype:{dtype}" for dtype in dtypes],
    }


def kernel(name: str) -> str:
    """The kernel of :func:`definition`."""
    return _KERNEL.format(name=name).replace("{TILE}", "TILE")


def patterns(name: str, before: str, guards: str = "") -> str:
    """A file of no spellings yet, and of guards where there are any."""
    text = _PATTERNS.format(name=name, before=before)
    return f"{text}\n{_GUARDED.format(guards=guards)}" if guards else text


def test_file(name: str, *, near_miss: bool) -> str:
    """Tests that hold for any kernel; with ``near_miss``, one that holds for the soft cap."""
    return _TEST.format(
        name=name, imports="\nimport torch" if near_miss else "", near_miss=_NEAR_MISS if near_miss else ""
    )


def benchmark(name: str, sizes: dict[str, int], growing: str, factors: tuple[int, ...]) -> str:
    """A benchmark at growing sizes of one axis."""
    shown = "{" + ", ".join(f'"{axis}": {size}' for axis, size in sizes.items()) + "}"
    return _BENCHMARK.format(name=name, sizes=shown, growing=growing, factors=list(factors)).replace(
        f"== {growing!r}", f'== "{growing}"'
    )
