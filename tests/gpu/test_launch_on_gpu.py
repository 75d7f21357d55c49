"""On a GPU: launches use the current stream, and the interpreter computes what the machine computes."""

from __future__ import annotations

import math

import cuda.tile as ct
import pytest
import torch

from tilegym_fx.interpreter import interpret
from tilegym_fx.launch import launch

pytestmark = pytest.mark.gpu


@ct.kernel
def double_kernel(x, out, TILE: ct.Constant[int]):
    place = ct.bid(0)
    ct.store(out, (place,), ct.load(x, (place,), (TILE,)) * 2.0)


def test_a_launch_inside_a_graph_capture_is_captured():
    x, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    launch(double_kernel, (4,), (x, out, 256))
    torch.cuda.synchronize()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(double_kernel, (4,), (x, out, 256))
    torch.cuda.synchronize()
    assert out.sum() == 0
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2)


def test_a_launch_follows_a_side_stream():
    x, out = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(5.0)
        launch(double_kernel, (4,), (x, out, 256))
    side.synchronize()
    assert torch.equal(out, torch.full_like(out, 10.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_goes_to_the_tensors_device():
    x, out = torch.ones(1024, device="cuda:1"), torch.zeros(1024, device="cuda:1")
    launch(double_kernel, (4,), (x, out, 256))
    torch.cuda.synchronize(1)
    assert torch.equal(out, x * 2)
    assert torch.cuda.current_device() == 0


def kernel_of(function):
    @ct.kernel
    def body(x, y, out):
        x_tile = ct.load(x, (0, 0), (16, 16))
        y_tile = ct.load(y, (0, 0), (16, 16))
        ct.store(out, (0, 0), ct.astype(function(x_tile, y_tile), out.dtype))

    return body


def values(dtype, generator):
    x = torch.randn(16, 16, generator=generator) * 4
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-3, 6e4, -6e4])
    return x.to(dtype)


def add(x, y):
    return x + y


def mul(x, y):
    return x * y


def sub_literal(x, y):
    return x - 0.1


def mul_literal(x, y):
    return x * 0.1


def where(x, y):
    return ct.where(x > y, x, y)


def maximum(x, y):
    return ct.maximum(x, y)


def max_of_nan(x, y):
    return ct.max(ct.where(x > 1.0, x, math.nan), axis=1, keepdims=True) + x


def maximum_of_nan(x, y):
    return ct.maximum(ct.where(x > 0.0, x, math.nan), y)


def cast(x, y):
    return ct.astype(ct.astype(x, ct.float32) * 1.1, x.dtype)


def transpose(x, y):
    return ct.transpose(x) + y


def argmax(x, y):
    return ct.argmax(x, axis=1, keepdims=True) + ct.zeros((16, 16), ct.int32)


def bytes_in_order(x, y):  # the first 512 of them, as they lie, two and two
    some = ct.extract(ct.pack_to_bytes(x), (0,), (512,))
    return ct.reshape(ct.unpack_from_bytes(some, ct.int16), (16, 16))


def floor(x, y):
    return ct.floor(x)


def div(x, y):
    return x / y


def exp(x, y):
    return ct.exp(ct.minimum(x, 8.0))


def exp2(x, y):
    return ct.exp2(ct.minimum(x, 8.0))


def log(x, y):
    return ct.log(ct.abs(x) + 1.0)


def rsqrt(x, y):
    return ct.rsqrt(ct.abs(x) + 1.0)


def tanh(x, y):
    return ct.tanh(x)


def sin(x, y):
    return ct.sin(ct.minimum(ct.maximum(x, -8.0), 8.0))


def mma(x, y):  # of numbers alike in size: a sum that cancels tells nothing
    return ct.mma(ct.abs(ct.maximum(x, -8.0)), ct.minimum(ct.abs(y), 8.0), ct.zeros((16, 16), ct.float32))


def sum_of_rows(x, y):
    return ct.sum(ct.maximum(ct.minimum(x, 8.0), -8.0), axis=1, keepdims=True) + y * 0.0


EXACT = [
    add,
    mul,
    sub_literal,
    mul_literal,
    where,
    maximum,
    max_of_nan,
    maximum_of_nan,
    cast,
    transpose,
    argmax,
    bytes_in_order,
    floor,
]
CLOSE = [div, exp, exp2, log, rsqrt, tanh, sin, mma, sum_of_rows]


def both(function, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = values(dtype, generator), values(dtype, generator)
    kernel = kernel_of(function)
    interpreted = torch.zeros(16, 16)
    interpret(kernel, (1,), (x, y, interpreted))
    launched = torch.zeros(16, 16, device="cuda")
    launch(kernel, (1,), (x.cuda(), y.cuda(), launched))
    return interpreted, launched.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", EXACT)
def test_the_interpreter_gives_the_same_bits(function, dtype):
    interpreted, launched = both(function, dtype)
    torch.testing.assert_close(interpreted, launched, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", CLOSE)
def test_the_interpreter_is_within_rounding(function, dtype):
    interpreted, launched = both(function, dtype)
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
    scale = 8 if function is sum_of_rows else 1
    torch.testing.assert_close(interpreted, launched, rtol=2 * step * scale, atol=step * scale, equal_nan=True)


@ct.kernel
def edge_kernel(x, out):
    ct.store(out, (0, 0), ct.astype(ct.load(x, (0, 1), (16, 16), padding_mode=ct.PaddingMode.ZERO), out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [17, 24, 32])
def test_a_tile_that_sticks_out_is_filled_with_zeros(dtype, columns):
    x = torch.randn(5, columns).to(dtype)
    interpreted, launched = torch.ones(16, 16), torch.ones(16, 16, device="cuda")
    interpret(edge_kernel, (1,), (x, interpreted))
    launch(edge_kernel, (1,), (x.cuda(), launched))
    assert torch.equal(interpreted, launched.cpu())


@ct.kernel
def order_kernel(x, out):
    ct.store(out, (0, 0, 0), ct.load(x, (1, 0, 0), (2, 2, 4), order=(2, 0, 1)))


def test_an_order_of_three_axes_means_the_same():
    x = torch.randn(2, 4, 8)
    interpreted, launched = torch.zeros(2, 2, 4), torch.zeros(2, 2, 4, device="cuda")
    interpret(order_kernel, (1,), (x, interpreted))
    launch(order_kernel, (1,), (x.cuda(), launched))
    assert torch.equal(interpreted, launched.cpu())
