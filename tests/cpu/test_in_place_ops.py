"""The op that writes a Definition's results over its inputs, beside the one that gives them anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fresh_compiler import fresh_compiler
from inputs import make_inputs
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import tilegym_fx
from tilegym_fx import inventory, ops
from tilegym_fx.errors import MatchError
from tilegym_fx.ops import backends
from tilegym_fx.ops.in_place import InPlaceOp

NAME = "rotary_cache_write"
WRITTEN = {1: "keys", 2: "values"}
pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
    yield
    ops.set_backend("auto")


def inputs_of() -> dict[str, torch.Tensor]:
    return make_inputs(NAME, torch.float32, "ordinary", "as trained", {"S": 3, "T": 8, "D": 16})


def expected() -> tuple[torch.Tensor, ...]:
    return inventory.load().reference(NAME)(**inputs_of())


def written() -> tuple[torch.Tensor, ...]:
    """What the writing op returns and leaves behind; everything else is as it was."""
    inputs, before = inputs_of(), inputs_of()
    q_out = ops.writing_overload(NAME, WRITTEN)(**inputs)
    assert all(torch.equal(inputs[k], before[k]) for k in inputs if k not in WRITTEN.values())
    return q_out, inputs["keys"], inputs["values"]


def test_its_schema_says_what_it_writes() -> None:
    schema = str(ops.writing_overload(NAME, WRITTEN)._schema)
    assert "Tensor(a!) keys, Tensor(b!) values, Tensor positions) -> Tensor" in schema
    assert schema.startswith("tilegym_fx::rotary_cache_write_(Tensor q, Tensor k")


@pytest.mark.parametrize("backend", ["auto", "torch", "interpret"])
def test_it_leaves_behind_what_the_other_returns(backend: str) -> None:
    ops.set_backend(backend)
    for got, right in zip(written(), expected(), strict=True):
        torch.testing.assert_close(got, right)


def test_the_kernels_own_writing_function_is_run() -> None:
    entry = inventory.load().entry_point(NAME)
    op = InPlaceOp(inventory.load().definition(NAME), inventory.load(), WRITTEN)
    assert op._implementation(NAME) is entry.__globals__["rotary_cache_write_"]


@pytest.mark.parametrize("backend", ["torch", "interpret"])
def test_results_of_a_kernel_without_one_are_copied(backend: str) -> None:
    op = InPlaceOp(inventory.load().definition("linear_add"), inventory.load(), {0: "residual"})
    x, weight, residual = torch.randn(3, 16), torch.randn(5, 16), torch.randn(3, 5)
    wanted = residual + x @ weight.T
    ops.set_backend(backend)
    assert op.cpu(x, weight, residual) is None
    torch.testing.assert_close(residual, wanted)


def test_results_of_others_are_copied() -> None:
    @ops.register_impl(NAME, "mine")
    def mine(q: Any, *others: Any) -> tuple[torch.Tensor, ...]:
        return q * 2, torch.ones_like(others[4]), torch.zeros_like(others[5])

    ops.set_backend("mine")
    q_out, keys, values = written()
    assert torch.equal(q_out, inputs_of()["q"] * 2)
    assert (keys == 1).all()
    assert (values == 0).all()


def test_a_call_that_is_recorded_has_the_authors_gradient() -> None:
    def gradients(run: Any) -> tuple[torch.Tensor, ...]:
        inputs = inputs_of()
        leaves = [inputs[k].requires_grad_() for k in ("q", "k", "v")]
        q_out = run(inputs)
        loss = (q_out * q_out).sum() + (inputs["keys"] ** 3).sum() + (inputs["values"] ** 3).sum()
        return torch.autograd.grad(loss, leaves)

    def author(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        q_out, keys, values = inventory.load().reference(NAME)(**inputs)
        inputs["keys"].copy_(keys)
        inputs["values"].copy_(values)
        return q_out

    torch.testing.assert_close(
        gradients(lambda inputs: ops.writing_overload(NAME, WRITTEN)(**inputs)), gradients(author)
    )


def test_opcheck() -> None:
    torch.library.opcheck(ops.writing_overload(NAME, WRITTEN), tuple(inputs_of().values()))


class Layer(nn.Module):
    """A step as a model with a static cache makes it."""

    def forward(
        self, q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any
    ) -> torch.Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin for x in (q, k))
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        return q.sum(1) @ keys.sum(1).mT @ values.sum(1)


def test_inductor_writes_into_the_cache_and_copies_nothing() -> None:
    fresh_compiler()
    ours, theirs = inputs_of(), inputs_of()
    compiled = torch.compile(Layer(), backend="tilegym_fx", options={"only": NAME})
    with torch.no_grad(), config.patch(force_disable_caches=True):
        result, (text,) = run_and_get_code(compiled, **ours)
        torch.testing.assert_close(result, Layer()(**theirs))
    torch.testing.assert_close(ours, theirs)
    (call,) = (line for line in text.splitlines() if "rotary_cache_write_.default(" in line and "=" in line)
    assert call.count("arg") == len(ours), call


def test_source_form_leaves_it_to_the_author() -> None:
    with pytest.raises(MatchError, match="its results are written over its inputs"):
        tilegym_fx.kernelize(Layer(), inputs=inputs_of(), only=NAME, strict=True)
