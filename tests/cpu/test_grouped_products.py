"""Grouped products that stay in a graph get the strides that they demand, whatever copies the normal form drops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fresh_compiler import fresh_compiler
from pass_checks import capture
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegym_fx import ops
from tilegym_fx.normalize import note_products
from tilegym_fx.ops.strides import for_grouped_products

Code = Callable[..., torch.Tensor]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


product = F.grouped_mm
ROWS, WEIGHT, ENDS = normal(6, 17), normal(2, 16, 8), ends(4, 6)


def assert_runs(code: Code, *inputs: torch.Tensor, inner: str = "eager", only: list[str] | None = None) -> None:
    """Compiled it gives what it gives as written."""
    fresh_compiler()
    options = {"inner": inner, "only": only or []}
    compiled = torch.compile(code, backend="tilegym_fx", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), code(*inputs))


@pytest.mark.parametrize("only", [[], ["silu_mul"]])
def test_of_rows_whose_copy_is_dropped(only: list[str]) -> None:
    def gated(x: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        rows = F.silu(x[:, :16]) * up[:, :16]
        return product(rows.contiguous(), weight, offs=last) + product(x[:, 1:].contiguous(), weight, offs=last)

    assert_runs(gated, ROWS, normal(6, 17), WEIGHT, ENDS, only=only)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("code", "rows"),
    [
        (lambda x, w, e: product(x.contiguous(), w, offs=e), ROWS[:, 1:]),
        (lambda x, w, e: product(x.clone(), w, offs=e), ROWS[:, 1:]),
        (lambda x, w, e: product(x * 1, w, offs=e), ROWS[:, 1:]),
        (lambda x, w, e: product(x.float().to(torch.bfloat16), w, offs=e), ROWS[:, 1:]),
        (lambda x, w, e: (product(x, w, offs=e) + product(x.t().clone().t(), w, offs=e))[:6], normal(16, 8).t()),
    ],
)
def test_of_rows_that_the_caller_gives(code: Code, rows: torch.Tensor, inner: str) -> None:
    assert_runs(code, rows, WEIGHT, ENDS, inner=inner)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("code", "weight"),
    [
        (lambda x, w, e: product(x * 2, w.contiguous(), offs=e), normal(2, 16, 9)[..., 1:]),
        (lambda x, w, e: product(x * 2, w[..., 1:].clone(), offs=e), normal(2, 16, 9)),
        (lambda x, w, e: product(x * 2, (w[..., 1:] * 3).contiguous(), offs=e), normal(2, 16, 9)),
        (lambda x, w, e: product(x * 2, w.float().to(torch.bfloat16), offs=e), normal(2, 16, 9)[..., 1:]),
        (lambda x, w, e: product(x * 2, w.mT.contiguous(), offs=e), normal(2, 8, 16)),
    ],
)
def test_of_weights(code: Code, weight: torch.Tensor, inner: str) -> None:
    assert_runs(code, normal(6, 16), weight, ENDS, inner=inner)


@pytest.mark.parametrize(
    ("code", "inputs"),
    [
        (lambda x, w, e: product((x * 2).t(), w, offs=e), (normal(12, 8), normal(2, 12, 8), ends(4, 8))),
        (lambda x, w, e: product((x * 2)[:, :12], w, offs=e), (normal(6, 16), normal(2, 12, 8), ENDS)),
        (lambda x, w, e: product((x * 2).t(), w * 2, offs=e), (normal(12, 8), normal(12, 8), ends(4, 12))),
        (lambda x, w, e: product(x * 2, (w * 2).t(), offs=e), (normal(2, 5, 16), normal(8, 16), ends(4, 8))),
        (lambda x, w: product(x[..., 1:].contiguous(), w), (normal(2, 5, 17), WEIGHT)),
        (lambda x, w: product((x * 2).mT, w), (normal(2, 16, 8), WEIGHT)),
    ],
    ids=["columns", "a part of wider rows", "groups along the sum", "groups of columns", "batches", "turned batches"],
)
def test_of_widths_that_are_no_whole_16_bytes_and_of_every_kind(code: Code, inputs: tuple[torch.Tensor, ...]) -> None:
    assert_runs(code, *inputs)


def test_what_is_seen_through_views_alone_is_not_copied() -> None:
    """A model's weights, turned round, are as they were given."""
    graph = capture(lambda x, w, e: product(x, w.mT, offs=e), (normal(6, 16), normal(2, 8, 16), ENDS)).graph
    assert note_products(graph) == 0


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (normal(6, 17)[:, 1:], normal(2, 16, 8)),
        (normal(6, 16), normal(2, 16, 9)[..., 1:]),
        (normal(6, 12), normal(2, 12, 9)[..., 1:]),
        (normal(6, 1).expand(6, 16), normal(2, 9, 16)[:, 1:].mT),
        (normal(6, 32)[:, ::2], normal(16, 8, 2).permute(2, 0, 1)),
    ],
)
def test_an_ops_reference_takes_any_strides_as_its_kernel_does(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """In a call, where only shapes are asked for, and for gradients."""
    expected = torch.cat((rows[:4] @ weight[0], rows[4:] @ weight[1]))
    op = ops.overload("grouped_linear")
    torch.testing.assert_close(op(rows, weight, ENDS), expected, rtol=2e-2, atol=2e-2)
    with FakeTensorMode() as mode:
        assert op(*map(mode.from_tensor, (rows, weight, ENDS))).shape == (6, 8)
    leaves = [tensor.detach().requires_grad_() for tensor in (rows, weight)]
    (op(*leaves, ENDS) * 1).sum().backward()  # torch takes no expanded gradients here
    gradient = leaves[0].grad
    assert gradient is not None
    torch.testing.assert_close(gradient[:4], weight[0].sum(1).expand(4, -1), rtol=2e-2, atol=2e-2)


def test_aligned_tensors_are_not_copied() -> None:
    for tensor in (WEIGHT, WEIGHT.mT, normal(2, 24, 16)[:, 3:], ENDS, normal(6, 24)[:, :10]):
        assert for_grouped_products((tensor, 3)) == (tensor, 3)
