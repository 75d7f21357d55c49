"""The interpreter: how kernels are run, what the language means, and what is refused."""

from __future__ import annotations

import inspect
import types
from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from cuda.tile import load as imported_load

from tilegym_fx.errors import KernelError
from tilegym_fx.interpreter import (
    InterpreterError,
    OutOfBoundsError,
    TileTypeError,
    UnsupportedOpError,
    interpret,
)
from tilegym_fx.interpreter.namespace import OPERATIONS

SCALE = 3.0


@ct.kernel
def scale_kernel(x, out, TILE: ct.Constant[int]):
    place = ct.bid(0)
    ct.store(out, (place,), ct.load(x, (place,), (TILE,)) * SCALE)


def test_a_grid_covers_the_array_block_by_block():
    x = torch.randn(64)
    out = torch.empty(64)
    interpret(scale_kernel, (4,), (x, out, 16))
    assert torch.equal(out, x * 3)


@ct.kernel
def place_kernel(out):
    x, y, z = ct.bid(0), ct.bid(1), ct.bid(2)
    number = x + y * ct.num_blocks(0) + z * ct.num_blocks(0) * ct.num_blocks(1)
    ct.store(out, (z, y, x), number)


def test_block_indices_and_counts_follow_the_three_axes():
    out = torch.full((2, 3, 4), -1, dtype=torch.int32)
    interpret(place_kernel, (4, 3, 2), (out,))
    assert torch.equal(out.flatten(), torch.arange(24, dtype=torch.int32))


@ct.kernel
def swapped_kernel(x, out, TILE: ct.Constant[int]):
    row, column = ct.bid(0), ct.bid(1)
    ct.store(out, (column, row), ct.load(x, (row, column), (TILE, TILE)))


def test_a_kernel_with_swapped_indices_gives_a_wrong_result():
    x = torch.randn(32, 32)
    out = torch.empty(32, 32)
    interpret(swapped_kernel, (2, 2), (x, out, 16))
    assert not torch.equal(out, x)


def test_the_same_kernel_leaves_an_array_that_is_not_square():
    x = torch.randn(32, 64)
    with pytest.raises(OutOfBoundsError, match=r"swapped_kernel, block \(0, 2, 0\) \(test_interpreter.py:\d+\)"):
        interpret(swapped_kernel, (2, 4), (x, torch.empty(32, 64), 16))


@ct.kernel
def in_place_kernel(x):
    before = ct.load(x, (0,), (8,))
    ct.store(x, (0,), before + 1.0)
    ct.store(x, (1,), before)


def test_a_loaded_tile_keeps_its_values_when_memory_changes():
    x = torch.zeros(16)
    interpret(in_place_kernel, (1,), (x,))
    assert torch.equal(x, torch.cat([torch.ones(8), torch.zeros(8)]))


# --- the language


def helper(tile):
    return innermost(tile) + ct.full(tile.shape, 1.0, tile.dtype)


def innermost(tile):
    return tile * SCALE


@ct.function
def decorated_helper(tile):
    return innermost(tile)


@ct.kernel
def helper_kernel(x, out):
    ct.store(out, (0,), helper(imported_load(x, (0,), (8,))) + decorated_helper(imported_load(x, (0,), (8,))))


def test_helpers_decorated_helpers_and_imported_names_are_interpreted():
    x = torch.randn(8)
    out = torch.empty(8)
    interpret(helper_kernel, (1,), (x, out))
    assert torch.allclose(out, x * 6 + 1)


def test_helpers_of_another_module_and_closures_are_interpreted():
    other = types.ModuleType("other")
    exec("import cuda.tile as ct\ndef halve(tile):\n    return ct.truediv(tile, 2.0)", vars(other))
    offset = 5.0

    @ct.kernel
    def closure_kernel(x, out):
        ct.store(out, (0,), other.halve(ct.load(x, (0,), (8,))) + offset)

    x = torch.randn(8)
    out = torch.empty(8)
    interpret(closure_kernel, (1,), (x, out))
    assert torch.allclose(out, x / 2 + 5)


def test_interpreting_leaves_cuda_tile_and_the_kernel_alone():
    before = {name: getattr(ct, name) for name in ct.__all__}
    scope = scale_kernel._pyfunc.__globals__
    interpret(scale_kernel, (1,), (torch.zeros(16), torch.zeros(16), 16))
    assert {name: getattr(ct, name) for name in ct.__all__} == before
    assert scope["ct"] is ct
    with pytest.raises(RuntimeError, match="only be called from device code"):
        ct.bid(0)


@ct.kernel
def loop_kernel(out, count, TILE: ct.Constant[int], LOOPS: ct.Constant[int]):
    total = ct.zeros((TILE,), ct.int32)
    for i in range(1, count, 2):
        total = total + i
    for i in ct.static_iter(range(LOOPS)):
        total = total + ct.full((2**i,), 100, ct.int32)
    while total.shape[0] != TILE:
        total = total + 1
    ct.store(out, (0,), total)


def test_loops_run_and_an_unrolled_loop_variable_is_a_constant():
    out = torch.empty(1, dtype=torch.int32)
    interpret(loop_kernel, (1,), (out, 6, 1, 1))
    assert out.tolist() == [1 + 3 + 5 + 100]


@ct.kernel
def runtime_shape_kernel(out, count):
    for i in range(count):
        ct.store(out, (0,), ct.zeros((i,), ct.float32))


def test_a_runtime_value_is_no_shape():
    with pytest.raises(TileTypeError, match="must be a compile-time constant"):
        interpret(runtime_shape_kernel, (1,), (torch.zeros(4), 4))


@ct.kernel
def builtins_kernel(x, out):
    tile = ct.load(x, (0,), (4,))
    ct.store(out, (0,), max(abs(tile), 1.0) + min(x.shape[0], 2))


def test_builtin_max_min_and_abs_work_on_tiles_and_scalars():
    out = torch.empty(4)
    interpret(builtins_kernel, (1,), (torch.tensor([-3.0, -0.5, 0.5, 3.0]), out))
    assert out.tolist() == [5, 3, 3, 5]


@ct.kernel
def branch_kernel(out, WHICH: ct.Constant[int]):
    if ct.bid(0) == 0 and WHICH == 1:
        ct.store(out, (0,), 1.0)
    elif ct.bid(0) > 0:
        ct.store(out, (1,), 2.0)


def test_branches_on_scalars_and_constants():
    out = torch.zeros(2)
    interpret(branch_kernel, (2,), (out, 1))
    assert out.tolist() == [1, 2]


@ct.kernel
def several_kernel(arrays, out):
    a, b = arrays
    ct.store(out, (0,), ct.load(a, (0,), (4,)) + ct.load(b, (0,), (4,)))


def test_a_tuple_of_arrays_is_an_argument():
    out = torch.empty(4)
    interpret(several_kernel, (1,), ((torch.ones(4), torch.ones(4)), out))
    assert out.tolist() == [2] * 4


# --- what is refused


@ct.kernel
def unknown_op_kernel(x):
    ct.printf("%f", ct.load(x, (0,), (1,)))


def test_an_operation_that_is_not_interpreted_is_named():
    with pytest.raises(UnsupportedOpError, match=r"ct\.printf is not interpreted.*docs/interpreter\.md"):
        interpret(unknown_op_kernel, (1,), (torch.zeros(4),))


@ct.kernel
def misspelt_kernel(x):
    ct.laod(x, (0,), (1,))


def test_a_name_that_cutile_does_not_have_is_named():
    with pytest.raises(UnsupportedOpError, match=r"cuda\.tile has no 'laod'"):
        interpret(misspelt_kernel, (1,), (torch.zeros(4),))


def test_errors_name_kernel_block_line_and_next_step():
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "ct.printf(" in text)
    with pytest.raises(InterpreterError) as caught:
        interpret(unknown_op_kernel, (1,), (torch.zeros(4),))
    assert isinstance(caught.value, KernelError)
    assert f"kernel unknown_op_kernel, block (0, 0, 0) (test_interpreter.py:{line})" in str(caught.value)


@pytest.mark.parametrize("grid", [(), (0,), (1, 2, 3, 4), (1.0,), (1, 65536), (1, 1, 70000)])
def test_a_grid_that_cuda_refuses_is_refused(grid):
    with pytest.raises(InterpreterError, match="grid"):
        interpret(scale_kernel, grid, (torch.zeros(16), torch.zeros(16), 16))


def test_a_wrong_number_of_arguments_is_refused():
    with pytest.raises(InterpreterError, match="takes 3 arguments, but got 2"):
        interpret(scale_kernel, (1,), (torch.zeros(16), torch.zeros(16)))


@pytest.mark.parametrize("argument", [None, "text", torch.float32, ct.float32])
def test_arguments_that_a_launch_refuses_are_refused(argument):
    with pytest.raises(TileTypeError, match="argument 'TILE'"):
        interpret(scale_kernel, (1,), (torch.zeros(16), torch.zeros(16), argument))


def test_a_tensor_that_is_not_on_the_cpu_is_refused():
    with pytest.raises(InterpreterError, match="a tensor on meta"):
        interpret(scale_kernel, (1,), (torch.zeros(16), torch.zeros(16, device="meta"), 16))


def test_a_plain_function_is_no_kernel():
    with pytest.raises(InterpreterError, match="is no cuTile kernel"):
        interpret(helper, (1,), (torch.zeros(16),))


@ct.kernel
def overflow_kernel(x, n):
    ct.load(x, (ct.bid(0) + n * n,), (1,))


def test_index_arithmetic_that_overflows_int32_is_refused():
    with pytest.raises(InterpreterError, match=r"the integer 10000000000 overflows int32"):
        interpret(overflow_kernel, (1,), (torch.zeros(4), 100_000))


@ct.kernel
def wide_kernel(out, n: ct.ScalarInt64):
    ct.store(out, (0,), n * n)


def test_an_argument_annotated_as_int64_does_not_overflow():
    out = torch.zeros(1, dtype=torch.int64)
    interpret(wide_kernel, (1,), (out, 100_000))
    assert out.item() == 10**10


@ct.kernel
def iterate_kernel(x):
    _first, _second = ct.load(x, (0,), (2,))


@ct.kernel
def index_kernel(x):
    ct.load(x, (0,), (2,))[0]


@ct.kernel
def assign_kernel(x):
    ct.load(x, (0,), (2,))[0] = 1.0


@ct.kernel
def truth_kernel(x):
    if ct.load(x, (0,), (2,)) > 0.0:
        pass


@ct.kernel
def subscript_kernel(x):
    x[0]


@pytest.mark.parametrize("kernel", [iterate_kernel, index_kernel, assign_kernel, truth_kernel, subscript_kernel])
def test_python_that_tiles_and_arrays_do_not_support_is_refused(kernel):
    with pytest.raises(TileTypeError):
        interpret(kernel, (1,), (torch.zeros(4),))


@ct.kernel
def claims_kernel(x, n, TILE: ct.Constant[int]):
    ct.static_assert(TILE == 4, "tile is four")
    ct.assume_divisible_by(n, 8)
    ct.assert_(ct.load(x, (0,), (TILE,)) >= 0.0, "not negative")  # noqa: PT009


@pytest.mark.parametrize(
    ("x", "n", "tile", "message"),
    [(1.0, 8, 2, "tile is four"), (1.0, 9, 4, "not divisible by 8"), (-1.0, 8, 4, "not negative")],
)
def test_a_kernel_s_own_claims_are_checked(x, n, tile, message):
    interpret(claims_kernel, (1,), (torch.ones(4), 8, 4))
    with pytest.raises(InterpreterError, match=message):
        interpret(claims_kernel, (1,), (torch.full((4,), x), n, tile))


# --- agreement with the installed cuda.tile


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_takes_the_parameters_that_cutile_s_takes(name):
    real = inspect.signature(getattr(ct, name)).parameters.values()
    ours = inspect.signature(OPERATIONS[name]).parameters
    by_position = [p for p in real if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert len([p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]) == len(by_position)
    by_name = [p for p in real if p.kind is not p.POSITIONAL_ONLY]
    assert {p.name for p in by_name} <= set(ours)
    for parameter in by_name:
        hint = parameter.name in ("memory_order", "memory_scope")
        assert hint or ours[parameter.name].default == parameter.default


def test_the_documentation_lists_every_operation():
    text = (Path(__file__).parents[2] / "docs" / "interpreter.md").read_text(encoding="utf-8")
    listed = text.split("## Operations")[1].split("\n\n")[1].replace("`", "").split()
    assert listed == sorted({*OPERATIONS, "bid", "num_blocks"})
