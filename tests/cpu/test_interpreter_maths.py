"""The interpreter's numbers: promotion, rounding, NaNs, reductions, matrix products, and shapes."""

from __future__ import annotations

import itertools
import math

import cuda.tile as ct
import pytest
import torch
from cuda.tile._datatype import promote_dtypes

from tilegym_fx.interpreter import InterpreterError, TileTypeError, interpret
from tilegym_fx.interpreter.dtypes import OF_TORCH, TORCH, promote


def compute(function, *inputs):
    """``function`` on whole tensors as tiles, inside an interpreted kernel."""
    shapes = [tuple(tensor.shape) for tensor in inputs]
    results = []

    @ct.kernel
    def body(arrays):
        results.append(function(*(ct.load(a, (0,) * len(s), s) for a, s in zip(arrays, shapes, strict=True))))

    interpret(body, (1,), (inputs,))
    return results[0]


def data(function, *inputs):
    return compute(function, *inputs).data


# --- promotion


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(TORCH, 2)))
def test_dtypes_mix_as_the_installed_cutile_mixes_them(first, second):
    try:
        expected = promote_dtypes(first, second)
    except ct.TileTypeError:
        expected = None
    if expected is None:
        with pytest.raises(TileTypeError, match="implicit promotion"):
            promote(first, second)
    else:
        assert promote(first, second) == promote(second, first) == expected


@pytest.mark.parametrize(
    ("dtype", "number", "expected"),
    [
        (torch.bfloat16, 1, ct.bfloat16),
        (torch.bfloat16, 1.5, ct.bfloat16),
        (torch.int64, 1, ct.int64),
        (torch.uint8, 255, ct.uint8),
        (torch.int32, 1.5, ct.float32),
        (torch.int64, True, ct.int64),
        (torch.bool, 1, ct.int32),
    ],
)
def test_a_python_number_takes_the_tile_s_dtype_unless_its_category_is_stronger(dtype, number, expected):
    assert compute(lambda x: x + number, torch.ones(4).to(dtype)).dtype == expected


def test_an_integer_that_the_tile_cannot_hold_is_refused():
    with pytest.raises(TileTypeError, match="256 is out of range of uint8"):
        compute(lambda x: x + 256, torch.ones(4, dtype=torch.uint8))


@ct.kernel
def eps_kernel(x, eps, EPS: ct.Constant[float], runtime, constant):
    ct.store(runtime, (0,), ct.load(x, (0,), (4,)) + eps)
    ct.store(constant, (0,), ct.load(x, (0,), (4,)) + EPS)


def test_a_runtime_float_is_float32_and_a_constant_is_the_tile_s():
    x = torch.full((4,), 3.0, dtype=torch.bfloat16)
    runtime, constant = torch.zeros(4), torch.zeros(4)
    interpret(eps_kernel, (1,), (x, 0.001, 0.001, runtime, constant))
    assert runtime[0] == torch.tensor(3.0) + torch.tensor(0.001)
    assert constant[0] == 3.0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.astype(ct.float16) + y.astype(ct.bfloat16),
        lambda x, y: ct.where(x > y, x.astype(ct.float16), y.astype(ct.bfloat16)),
        lambda x, y: (x > y) + (x < y),
        lambda x, y: x & y,
        lambda x, y: x.astype(ct.int32) & y.astype(ct.int64),
        lambda x, y: x.astype(ct.int32) ** 2,
        lambda x, y: ct.floor(x.astype(ct.int32)),
        lambda x, y: x.astype(ct.tfloat32) + y,
        lambda x, y: ~x,
        lambda x, y: ct.mma(x, y, ct.zeros((4,), ct.float32)),
        lambda x, y: ct.reshape(x, (2,)) + y,
        lambda x, y: ct.exp(x, rounding_mode=ct.RoundingMode.RZ),
        lambda x, y: ct.exp(x.astype(ct.bfloat16), rounding_mode=ct.RoundingMode.APPROX),
        lambda x, y: ct.full((4,), x, ct.float32),
    ],
)
def test_what_cutile_refuses_is_refused(function):
    with pytest.raises(TileTypeError):
        compute(function, torch.zeros(4), torch.zeros(4))


# --- rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x - y],
    ids=["add", "mul", "div", "sub"],
)
def test_half_precision_arithmetic_rounds_each_result_once(function, dtype):
    x, y = torch.randn(256).to(dtype), torch.randn(256).to(dtype)
    exact = function(x.double(), y.double())
    assert torch.equal(data(function, x, y), exact.to(dtype))
    assert not torch.equal(data(function, x, y).double(), exact)


def test_a_constant_is_rounded_to_the_tile_s_dtype_first():
    x = torch.linspace(-2, 2, 256).bfloat16()
    expected = (x.double() * torch.tensor(0.1).bfloat16().double()).bfloat16()
    assert torch.equal(data(lambda t: t * 0.1, x), expected)
    assert not torch.equal(x * 0.1, expected)  # torch keeps 0.1 in float32


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "tan", "sinh"])
def test_functions_of_bfloat16_are_computed_wider_and_rounded_once(name):
    x = torch.linspace(0.1, 3, 256).bfloat16()
    function = torch.exp2 if name == "exp2" else getattr(torch, name)
    got = data(lambda t: getattr(ct, name)(t), x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, function(x.float()).bfloat16())


def test_functions_of_integers_are_float32_and_of_constants_are_numbers():
    assert compute(lambda x: ct.sqrt(x), torch.tensor([4, 9], dtype=torch.int32)).data.tolist() == [2, 3]
    assert compute(lambda x: (ct.exp2(3.0), ct.sqrt(4.0), ct.rsqrt(4.0)), torch.zeros(1)) == (8.0, 2.0, 0.5)


def test_casting_rounds_to_nearest_even():
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -2.7])
    assert data(lambda t: t.astype(ct.bfloat16), x).tolist()[:2] == [1.0, 1 + 2**-6]
    assert data(lambda t: ct.astype(t, ct.float16), x)[2] == math.inf
    assert data(lambda t: ct.astype(t, ct.int32), x)[3] == -2


def test_tfloat32_keeps_ten_mantissa_bits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, math.inf])
    assert data(lambda t: t.astype(ct.tfloat32), x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-9, math.inf]


def test_flush_to_zero_drops_subnormal_numbers():
    x = torch.tensor([-130.0, -10.0])
    assert data(lambda t: ct.exp2(t, flush_to_zero=True), x).tolist() == [0.0, 2**-10]
    assert data(lambda t: ct.exp2(t), x)[0] > 0


def test_integer_division_follows_python():
    x = torch.tensor([-7, 7, -8, 8], dtype=torch.int32)
    values = x.tolist()
    assert data(lambda t: t // 4, x).tolist() == [v // 4 for v in values]
    assert data(lambda t: t % 4, x).tolist() == [v % 4 for v in values]
    assert data(lambda t: ct.cdiv(t, 4), x).tolist() == [-(-v // 4) for v in values]
    assert compute(lambda t: t / 2, x).dtype == ct.float32


@ct.kernel
def divide_kernel(out, n):
    ct.store(out, (0,), 1 // n)


def test_division_of_scalars_by_zero_is_refused():
    with pytest.raises(InterpreterError, match="by zero"):
        interpret(divide_kernel, (1,), (torch.zeros(1, dtype=torch.int32), 0))


# --- NaNs and reductions


def test_a_nan_loses_in_max_and_min_unless_it_is_to_propagate():
    x = torch.tensor([1.0, math.nan, 3.0, math.nan])
    assert data(lambda t: ct.max(t), x) == 3
    assert data(lambda t: ct.min(t), x) == 1
    assert data(lambda t: ct.maximum(t, 2.0), x).tolist() == [2, 2, 3, 2]
    assert data(lambda t: ct.max(t, propagate_nan=True), x).isnan()
    assert data(lambda t: ct.maximum(t, 2.0, propagate_nan=True), x).isnan().tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert data(lambda t: ct.max(ct.reshape(t, (2, 2)), axis=1), torch.full((4,), math.nan)).tolist() == [-math.inf] * 2


def test_argmax_takes_the_first_of_equals_and_no_nan():
    x = torch.tensor([[1.0, 3.0, 3.0, math.nan], [5.0, 3.0, 5.0, 5.0]])
    assert data(lambda t: ct.argmax(t, axis=1), x).tolist() == [1, 0]
    assert compute(lambda t: ct.argmax(t), x).data == 4
    assert data(lambda t: ct.argmin(t, axis=1, keepdims=True), x).tolist() == [[0], [1]]


def test_reductions_along_axes_keep_dtype_and_dimensions():
    x = torch.randn(4, 2, 8)
    assert torch.allclose(data(lambda t: ct.sum(t), x), x.sum())
    assert torch.allclose(data(lambda t: ct.sum(t, axis=(0, -1)), x), x.sum((0, 2)))
    assert torch.allclose(data(lambda t: ct.prod(t, 1, keepdims=True), x), x.prod(1, keepdim=True))
    assert torch.allclose(data(lambda t: ct.cumsum(t, 2, reverse=True), x), x.flip(2).cumsum(2).flip(2))
    assert compute(lambda t: ct.sum(t), torch.ones(4, dtype=torch.int32)).dtype == ct.int32
    assert compute(lambda t: ct.sum(t), torch.ones(4, dtype=torch.bool)).dtype == ct.int32


def test_a_bfloat16_sum_rounds_its_partial_sums():
    x = torch.ones(512, dtype=torch.bfloat16)
    x[0] = 257.0  # 256 in bfloat16
    x[1:] = 0.5
    wide = data(lambda t: ct.sum(t.astype(ct.float32)), x)
    narrow = data(lambda t: ct.sum(t), x)
    assert narrow.dtype == torch.bfloat16
    assert wide == 256 + 511 / 2
    assert narrow != wide.bfloat16()


# --- matrix products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mma_multiplies_exactly_and_adds_in_float32(dtype):
    x, y, acc = torch.randn(16, 32).to(dtype), torch.randn(32, 8).to(dtype), torch.randn(16, 8)
    got = data(lambda a, b, c: ct.mma(a, b, c), x, y, acc)
    exact = x.double() @ y.double() + acc.double()
    assert got.dtype == torch.float32
    assert (got.double() - exact).abs().max() < 1e-4
    if dtype is torch.bfloat16:
        assert (got.double() - exact).abs().max() < (x @ y).double().sub(exact - acc.double()).abs().max() / 50


def test_matmul_rounds_to_the_operands_dtype():
    x, y = torch.randn(16, 32).bfloat16(), torch.randn(32, 8).bfloat16()
    got = compute(lambda a, b: ct.matmul(a, b), x, y)
    assert got.dtype == ct.bfloat16
    assert torch.equal(got.data, (x.float() @ y.float()).bfloat16())


def test_tfloat32_products_lose_what_float32_products_keep():
    x, y = torch.full((16, 16), 1 + 2**-12), torch.eye(16)
    product = lambda a, b: ct.mma(a, b, ct.zeros((16, 16), ct.float32))  # noqa: E731
    assert torch.equal(data(product, x, y), x)
    rounded = data(lambda a, b: product(a.astype(ct.tfloat32), b.astype(ct.tfloat32)), x, y)
    assert torch.equal(rounded, torch.ones(16, 16))


@pytest.mark.parametrize(
    ("x", "y", "acc"),
    [
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float16"),
        ("int32", "int32", "int32"),
    ],
)
def test_mma_refuses_dtypes_that_the_instruction_does_not_take(x, y, acc):
    tiles = [torch.zeros(16, 16, dtype=getattr(torch, name)) for name in (x, y, acc)]
    with pytest.raises(TileTypeError, match="mma of"):
        compute(lambda a, b, c: ct.mma(a, b, c), *tiles)


def test_mma_refuses_shapes_that_do_not_fit():
    tiles = torch.zeros(16, 8), torch.zeros(8, 4), torch.zeros(16, 8)
    with pytest.raises(TileTypeError, match=r"makes \(16, 4\)"):
        compute(lambda a, b, c: ct.mma(a, b, c), *tiles)
    with pytest.raises(TileTypeError, match="matrix product"):
        compute(lambda a, b, c: ct.mma(a, a, c), *tiles)


# --- shapes


def test_shape_operations_agree_with_torch():
    x = torch.randn(4, 8)
    assert torch.equal(data(lambda t: ct.reshape(t, (2, -1)), x), x.reshape(2, 16))
    assert torch.equal(data(lambda t: t.transpose(), x), x.T)
    assert torch.equal(data(lambda t: t.permute((1, 0)), x), x.T)
    assert torch.equal(data(lambda t: t[:, None, :], x), x[:, None])
    assert torch.equal(data(lambda t: t[..., None], x), x[..., None])
    assert torch.equal(data(lambda t: ct.expand_dims(t, -1), x), x[..., None])
    assert torch.equal(data(lambda t: ct.broadcast_to(t[None], (2, 4, 8)), x), x.expand(2, 4, 8))
    assert torch.equal(data(lambda t: ct.cat((t, t), 1), x), torch.cat([x, x], 1))
    assert torch.equal(data(lambda t: ct.extract(t, (1, 3), (2, 2)), x), x[2:4, 6:8])
    assert torch.equal(data(lambda t: ct.insert(t, (1, 0), ct.zeros((2, 8), ct.float32)), x)[:2], x[:2])
    assert data(lambda t: ct.insert(t, (1, 0), ct.zeros((2, 8), ct.float32)), x)[2:].count_nonzero() == 0
    assert data(lambda t: ct.bitcast(t, ct.int32), torch.ones(1)).item() == 0x3F800000
    ordered = torch.arange(4, dtype=torch.int16).view(2, 2)
    assert data(ct.pack_to_bytes, ordered).tolist() == [0, 0, 1, 0, 2, 0, 3, 0]
    assert data(lambda t: ct.unpack_from_bytes(ct.pack_to_bytes(t), ct.int32), ordered).tolist() == [
        1 << 16,
        (3 << 16) + 2,
    ]
    assert data(lambda t: ct.arange(4, dtype=ct.int32, start=2, step=3), x).tolist() == [2, 5, 8, 11]
    assert torch.equal(data(lambda t: ct.where(t > 0.0, t, 0.0), x), x.relu())
    assert data(lambda t: ct.extract(t, (1, 3), (1, 1)).item(), x) == x[1, 3]


@pytest.mark.parametrize(
    "function",
    [
        lambda t: ct.cat((t, ct.extract(t, (0, 0), (4, 4))), 1),
        lambda t: ct.cat((t, t, t), 0),
        lambda t: ct.cat((t, t.astype(ct.float16)), 0),
        lambda t: ct.reshape(t, (4, 4)),
        lambda t: ct.broadcast_to(t, (2, 8)),
        lambda t: ct.extract(t, (4, 0), (1, 8)),
        lambda t: ct.extract(t, (0, 0), (8, 8)),
        lambda t: t[0],
        lambda t: ct.arange(6, dtype=ct.int32),
        lambda t: ct.zeros((3, 4), ct.float32),
        lambda t: ct.sum(t, axis=2),
        lambda t: ct.permute(t, (0, 0)),
        lambda t: ct.bitcast(t, ct.int16),
        lambda t: ct.pack_to_bytes(t > 0.0),
        lambda t: ct.unpack_from_bytes(t, ct.int32),
        lambda t: ct.unpack_from_bytes(ct.extract(ct.pack_to_bytes(t), (0,), (2,)), ct.int32),
        lambda t: ct.transpose(ct.reshape(t, (2, 2, 8))),
    ],
)
def test_shapes_that_cutile_refuses_are_refused(function):
    with pytest.raises(InterpreterError):
        compute(function, torch.zeros(4, 8))


def test_dtype_names_make_scalars():
    assert compute(lambda t: ct.float32(2) + ct.zeros((2,), ct.bfloat16), torch.zeros(1)).dtype == ct.float32
    assert compute(lambda t: ct.int64(3), torch.zeros(1)).dtype == ct.int64
    assert compute(lambda t: t.dtype == ct.float32, torch.zeros(1)) is True
    assert set(OF_TORCH.values()) <= set(TORCH)
