"""The interpreter's loads, stores, gathers, scatters and atomics: edges, padding, masks and bounds."""

from __future__ import annotations

import math

import cuda.tile as ct
import pytest
import torch

from tilegym_fx.interpreter import OutOfBoundsError, TileTypeError, interpret


def run(body, *args, grid=(1,)):
    """Interpret the function ``body`` as a kernel."""
    interpret(ct.kernel(body), grid, args)


@pytest.mark.parametrize(
    ("mode", "value"),
    [("ZERO", 0.0), ("NEG_ZERO", -0.0), ("NAN", math.nan), ("POS_INF", math.inf), ("NEG_INF", -math.inf)],
)
def test_a_load_over_the_edge_is_padded_as_asked(mode, value):
    padding = ct.PaddingMode[mode]

    def body(x, out):
        ct.store(out, (0, 0), ct.load(x, (1, 1), (4, 4), padding_mode=padding))

    x = torch.randn(6, 7)
    out = torch.full((4, 4), 77.0)
    run(body, x, out)
    expected = torch.full((4, 4), value)
    expected[:2, :3] = x[4:, 4:]
    assert torch.equal(out.nan_to_num(nan=5.0), expected.nan_to_num(nan=5.0))
    assert torch.equal(out.signbit(), expected.signbit()) or math.isnan(value)


def test_a_load_over_the_edge_without_padding_is_refused():
    def body(x):
        ct.load(x, (1,), (4,))

    run(body, torch.zeros(8))
    with pytest.raises(OutOfBoundsError, match=r"crosses the edge of Array\(float32\[7\]\) with no padding"):
        run(body, torch.zeros(7))


def test_a_load_that_promises_to_be_inside_and_is_not_is_refused():
    def body(x):
        ct.load(x, (1,), (4,), padding_mode=ct.PaddingMode.ZERO, check_bounds=False)

    run(body, torch.zeros(8))
    with pytest.raises(OutOfBoundsError):
        run(body, torch.zeros(7))


@pytest.mark.parametrize("place", [2, -1])
def test_a_load_wholly_outside_is_refused_even_with_padding(place):
    def body(x, place):
        ct.load(x, (place,), (4,), padding_mode=ct.PaddingMode.ZERO)

    with pytest.raises(OutOfBoundsError, match="wholly outside"):
        run(body, torch.zeros(8), place)


def test_integers_are_padded_with_zero_only():
    def body(x, out, MODE):
        ct.store(out, (0,), ct.load(x, (0,), (4,), padding_mode=modes[MODE]))

    body.__annotations__["MODE"] = ct.Constant[int]
    modes = (ct.PaddingMode.ZERO, ct.PaddingMode.NEG_INF)
    out = torch.full((4,), 9, dtype=torch.int32)
    run(body, torch.ones(3, dtype=torch.int32), out, 0)
    assert out.tolist() == [1, 1, 1, 0]
    with pytest.raises(TileTypeError, match="padding of int32 with NEG_INF"):
        run(body, torch.ones(3, dtype=torch.int32), out, 1)


@pytest.mark.parametrize("length", [3, 0])
def test_tile_lengths_that_are_no_power_of_two_are_refused(length):
    def body(x, LENGTH: ct.Constant[int]):
        ct.load(x, (0,), (LENGTH,))

    with pytest.raises(TileTypeError, match=r"not a positive power of two"):
        run(body, torch.zeros(8), length)


def test_a_load_in_another_order_reads_the_transposed_array():
    def body(x, out):
        ct.store(out, (0, 0), ct.load(x, (1, 0), (2, 4), order=(1, 0)))

    x = torch.randn(4, 8)
    out = torch.empty(2, 4)
    run(body, x, out)
    assert torch.equal(out, x[:, 2:4].T)


def test_orders_of_three_axes_permute_before_tiling():
    def body(x, first, second):
        ct.store(first, (0, 0, 0), ct.load(x, (1, 0, 0), (2, 2, 4), order=(2, 0, 1)))
        ct.store(second, (0, 1, 0), ct.load(x, (0, 1, 0), (8, 2, 2), order="F"), order="F")

    x = torch.randn(2, 4, 8)
    first, second = torch.empty(2, 2, 4), torch.zeros(2, 4, 8)
    run(body, x, first, second)
    assert torch.equal(first, x.permute(2, 0, 1)[2:4])
    assert torch.equal(second[:, 2:], x[:, 2:])
    assert second[:, :2].abs().sum() == 0


def test_a_scalar_tile_is_loaded_and_stored():
    def body(x, out):
        ct.store(out, (1, 2), ct.load(x, (2, 1), ()) * 2.0)

    x = torch.randn(3, 3)
    out = torch.zeros(3, 3)
    run(body, x, out)
    assert out[1, 2] == x[2, 1] * 2
    assert out.count_nonzero() == 1


def test_strided_and_offset_views_are_written_in_place():
    def body(x, out):
        ct.store(out, (0, 0), ct.load(x, (0, 0), (4, 4)))

    x = torch.randn(8, 8)
    out = torch.zeros(8, 8)
    run(body, x[::2, 4:], out.T[4:, ::2])
    assert torch.equal(out.T[4:, ::2], x[::2, 4:])
    assert out.count_nonzero() == 16


def test_a_store_over_the_edge_keeps_to_the_array():
    def body(out):
        ct.store(out, (1, 1), ct.full((4, 4), 1.0, ct.float32))

    memory = torch.zeros(10, 10)
    run(body, memory[:6, :7])
    assert memory.nonzero().tolist() == [[i, j] for i in (4, 5) for j in (4, 5, 6)]


@pytest.mark.parametrize(("place", "checked"), [(2, True), (-1, True), (1, False)])
def test_a_store_outside_is_refused(place, checked):
    def body(out, place):
        ct.store(out, (place,), ct.zeros((4,), ct.float32), check_bounds=checked)

    with pytest.raises(OutOfBoundsError, match="store of a tile"):
        run(body, torch.zeros(7), place)


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("int32", "uint8"), ("float16", "bfloat16")])
def test_a_store_that_needs_an_explicit_cast_is_refused(source, target):
    def body(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (4,)))

    with pytest.raises(TileTypeError, match=f"{source} cannot be cast to {target} implicitly"):
        run(body, torch.zeros(4, dtype=getattr(torch, source)), torch.zeros(4, dtype=getattr(torch, target)))


def test_a_store_that_widens_needs_no_cast():
    def body(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (4,)))

    out = torch.zeros(4)
    run(body, torch.ones(4, dtype=torch.bfloat16), out)
    assert out.tolist() == [1] * 4


def test_ranks_that_differ_are_refused():
    def load(x):
        ct.load(x, (0,), (4,))

    def store(x):
        ct.store(x, (0, 0), ct.zeros((4,), ct.float32))

    for body in (load, store):
        with pytest.raises(TileTypeError, match="rank"):
            run(body, torch.zeros(4, 4))


def test_the_number_of_tiles_counts_the_partial_one():
    def body(x, out):
        ct.store(out, (0,), ct.num_tiles(x, 0, (4, 2)))
        ct.store(out, (1,), ct.num_tiles(x, 1, (4, 2)))
        ct.store(out, (2,), ct.num_tiles(x, 0, (4, 2), order=(1, 0)))

    out = torch.zeros(3, dtype=torch.int32)
    run(body, torch.zeros(10, 7), out)
    assert out.tolist() == [3, 4, 2]


def test_slices_and_tiled_views_share_the_array_s_memory():
    def body(x, start):
        view = x.slice(0, start, start + 3).tiled_view((2,), padding_mode=ct.PaddingMode.ZERO)
        for i in range(view.num_tiles(0)):
            view.store((i,), view.load((i,)) + 1.0)

    x = torch.zeros(8)
    run(body, x, 2)
    assert x.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    with pytest.raises(OutOfBoundsError, match="slice 6:9"):
        run(body, x, 6)


def test_a_gather_pads_where_the_mask_or_the_bounds_say_no():
    def body(x, index, out):
        places = ct.load(index, (0,), (4,))
        ct.store(out, (0,), ct.gather(x, places, mask=places != 1, padding_value=-5.0))

    out = torch.zeros(4)
    run(body, torch.tensor([10.0, 11.0, 12.0]), torch.tensor([0, 1, 3, -1], dtype=torch.int32), out)
    assert out.tolist() == [10, -5, -5, -5]


def test_gather_indices_broadcast_to_one_shape():
    def body(x, out):
        rows = ct.arange(2, dtype=ct.int32)[:, None] + 1
        ct.store(out, (0, 0), ct.gather(x, (rows, ct.arange(4, dtype=ct.int32))))

    x = torch.randn(4, 4)
    out = torch.empty(2, 4)
    run(body, x, out)
    assert torch.equal(out, x[1:3])


def test_unchecked_gathers_and_scatters_must_stay_inside():
    def gather(x, shift):
        ct.gather(x, ct.arange(4, dtype=ct.int32) + shift, check_bounds=False)

    def scatter(x, shift):
        ct.scatter(x, ct.arange(4, dtype=ct.int32) + shift, 1.0, check_bounds=False)

    for body in (gather, scatter):
        run(body, torch.zeros(4), 0)
        for shift in (1, -1):
            with pytest.raises(OutOfBoundsError, match="check_bounds=False touches places outside"):
                run(body, torch.zeros(4), shift)


def test_a_mask_protects_an_unchecked_gather():
    def body(x, out):
        places = ct.arange(8, dtype=ct.int32)
        ct.store(out, (0,), ct.gather(x, places, mask=places < 5, check_bounds=False))

    out = torch.full((8,), 9.0)
    run(body, torch.ones(5), out)
    assert out.tolist() == [1] * 5 + [0] * 3


def test_a_scatter_writes_only_active_places():
    def body(x, out):
        rows, columns = ct.arange(4, dtype=ct.int32)[:, None], ct.arange(2, dtype=ct.int32) + 1
        ct.scatter(out, (rows, columns), ct.load(x, (0, 0), (4, 2)), mask=rows != 1)

    x = torch.randn(4, 2)
    out = torch.zeros(3, 2)
    run(body, x, out)
    assert torch.equal(out, torch.tensor([[0, x[0, 0]], [0, 0], [0, x[2, 0]]]))


def test_a_mask_that_is_no_bool_is_refused():
    def body(x):
        ct.gather(x, ct.arange(4, dtype=ct.int32), mask=ct.arange(4, dtype=ct.int32))

    with pytest.raises(TileTypeError, match="mask of int32"):
        run(body, torch.zeros(4))


def test_atomics_of_all_blocks_add_up_and_return_what_was_there():
    def body(x, old, top):
        before = ct.atomic_add(x, ct.full((2,), 1, ct.int32), 2)
        ct.store(old, (ct.bid(0),), before)
        ct.atomic_max(top, 0, ct.bid(0) * 10)

    x, old, top = (torch.zeros(n, dtype=torch.int32) for n in (2, 6, 1))
    run(body, x, old, top, grid=(3,))
    assert x.tolist() == [0, 12]
    assert old.tolist() == [0, 2, 4, 6, 8, 10]
    assert top.tolist() == [20]


def test_compare_and_swap_changes_only_what_it_expects():
    def body(x, old):
        ct.store(old, (0,), ct.atomic_cas(x, ct.arange(4, dtype=ct.int32), 1, 9))

    x, old = torch.tensor([1, 2, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(body, x, old)
    assert x.tolist() == [9, 2, 9]
    assert old.tolist() == [1, 2, 1, 1]


def test_lengths_and_strides_are_runtime_values_unless_annotated():
    from typing import Annotated

    def dynamic(x):
        ct.zeros((x.shape[0],), ct.float32)

    def fixed(x):
        ct.zeros((x.shape[0],), ct.float32)

    fixed.__annotations__["x"] = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]
    run(fixed, torch.zeros(4))
    with pytest.raises(TileTypeError, match=r"is int32\(4\)"):
        run(dynamic, torch.zeros(4))
