"""The gradients of the ops are those of their references: of every order, and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_fx import inventory, ops
from tilegym_fx.errors import UsageError

CPU_AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


def of_one_leaf(silu_mul: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One input is computed from the other: a gradient that came round through both would count twice."""

    def code(leaf: torch.Tensor) -> torch.Tensor:
        gate = leaf * 2
        return silu_mul(gate, gate.sin())

    return code


def second_order(code: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaf = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).requires_grad_()
    (first,) = torch.autograd.grad(code(leaf).pow(3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), leaf)
    return first, second, third


def test_gradients_of_gradients_are_those_of_the_reference() -> None:
    own = second_order(of_one_leaf(ops.overload("silu_mul")))
    theirs = second_order(of_one_leaf(inventory.load().reference("silu_mul")))
    torch.testing.assert_close(own, theirs)


def test_a_gradient_that_nobody_differentiates_has_no_graph() -> None:
    leaf = torch.linspace(0.5, 1.5, 6).requires_grad_()
    of_one_leaf(ops.overload("silu_mul"))(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.grad_fn is None


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_backward_runs_under_the_autocast_of_its_forward(forward: bool, backward: bool) -> None:
    def gradients(linear_add: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shapes = {"input": (3, 8), "weight": (6, 8), "residual": (3, 6)}
        leaves = {k: torch.randn(s, generator=generator).requires_grad_() for k, s in shapes.items()}
        with torch.autocast(**CPU_AUTOCAST, enabled=forward):
            loss = linear_add(*(leaves[name] for name in inventory.load().definitions["linear_add"].inputs)).sum()
        with torch.autocast(**CPU_AUTOCAST, enabled=backward):
            return torch.autograd.grad(loss, list(leaves.values()))

    own, theirs = gradients(ops.overload("linear_add")), gradients(inventory.load().reference("linear_add"))
    torch.testing.assert_close(own, theirs, rtol=0, atol=0)


def test_a_query_without_keys_has_the_gradient_that_its_author_wrote() -> None:
    """Of rows that a padded batch masks throughout, torch's fused attention on a CPU has another one."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 5, 5), lowest).triu(1)
    mask[..., :2] = lowest

    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(q @ k.transpose(-1, -2) * 0.25 + mask, -1) @ v).transpose(1, 2)

    def gradients(code: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(1, 2, 5, 16, generator=generator).requires_grad_() for _ in range(3)]
        return torch.autograd.grad(code(*leaves).square().sum(), leaves)

    op = ops.overload("gqa_attention_masked")
    torch.testing.assert_close(gradients(lambda q, k, v: op(q, k, v, mask, 0.25)), gradients(written))


class TestFreeChoices:
    """A gradient belongs to what an op chose, where its reference would have chosen otherwise."""

    @pytest.fixture(autouse=True)
    def kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TILEGYM_FX_INTERPRET", "1")

    def test_rows_of_one_expert_may_stand_in_any_order(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(60, 8, generator=generator, requires_grad=True)
        index = torch.randint(0, 3, (60, 2), generator=generator)
        rows, order, _ = ops.overload("experts_rows")(x, index, 3)
        assert not torch.equal(order, inventory.load().reference("experts_rows")(x, index, 3)[1])
        given = torch.randn(rows.shape, generator=generator)
        for _ in range(2):
            (got,) = torch.autograd.grad(rows, x, given, retain_graph=True)
            torch.testing.assert_close(got, torch.zeros_like(x).index_add(0, order // 2, given))

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("name", ["router_softmax_topk", "router_softmax_topk_norm", "router_topk_softmax"])
    def test_of_experts_that_are_equally_good_any_may_be_taken(self, name: str, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randint(0, 9, (20, 64), generator=generator).float().requires_grad_()

        def right(index: torch.Tensor) -> torch.Tensor:
            if name == "router_topk_softmax":
                return torch.softmax(logits.gather(-1, index), -1)
            shares = torch.softmax(logits, -1).gather(-1, index)
            return shares / shares.sum(-1, keepdim=True) if name.endswith("norm") else shares

        torch._dynamo.reset()
        op = ops.overload(name)
        run = torch.compile(lambda logits: op(logits, 6), backend="aot_eager") if compiled else lambda x: op(x, 6)
        weights, index = run(logits)
        assert not torch.equal(index, inventory.load().reference(name)(logits, 6)[1])
        given = torch.randn(weights.shape, generator=generator)
        (got,) = torch.autograd.grad(weights, logits, given)
        (wanted,) = torch.autograd.grad(right(index), logits, given)
        torch.testing.assert_close(got, wanted)

    def test_the_last_of_several_choices_is_the_one_that_is_followed(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randint(0, 4, (20, 32), generator=generator).float().requires_grad_()
        bias = torch.zeros(32)
        sizes = {"k": 2, "eps": 1e-20, "scale": 2.5, "kept": 2, "groups": 4}
        scalars = [sizes[key] for key in inventory.load().definitions["router_sigmoid_groups"].inputs if key in sizes]
        weights, index = ops.overload("router_sigmoid_groups")(logits, bias, *scalars)
        assert not torch.equal(index, inventory.load().reference("router_sigmoid_groups")(logits, bias, *scalars)[1])
        given = torch.randn(weights.shape, generator=generator)
        (got,) = torch.autograd.grad(weights, logits, given)
        chosen = torch.sigmoid(logits).gather(-1, index)
        (wanted,) = torch.autograd.grad(2.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20), logits, given)
        torch.testing.assert_close(got, wanted)


class TestForwardMode:
    """An op has no derivative forwards: an error, where torch by itself takes it for 0."""

    X, TANGENT = torch.linspace(0.5, 1.5, 6), torch.ones(6)

    @staticmethod
    def code(x: torch.Tensor) -> torch.Tensor:
        return ops.overload("silu_mul")(x * 2, x.sin())

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("op", ["torch.ops", "tilegym_fx.ops"])
    def test_a_tangent_is_refused(self, op: str, grad: bool) -> None:
        silu_mul: Callable[..., Any] = ops.overload("silu_mul") if op == "torch.ops" else ops.silu_mul
        with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad):
            dual = torch.autograd.forward_ad.make_dual(self.X, self.TANGENT)
            with pytest.raises(UsageError, match=r"silu_mul.*torch\.autograd\.functional\.jvp"):
                silu_mul(self.X, dual)

    def test_an_op_without_a_tangent_runs_beside_those_that_have_one(self) -> None:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(self.X, self.TANGENT)
            result = torch.autograd.forward_ad.unpack_dual(dual * self.code(self.X))
            torch.testing.assert_close(result.tangent, self.code(self.X))

    @pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
    def test_the_transforms_that_use_it_are_refused(self, transform: Callable[..., Any]) -> None:
        with pytest.raises((UsageError, RuntimeError)):
            transform(lambda x: self.code(x).sum())(self.X)
        with pytest.raises(UsageError, match="forward-mode"):
            torch.func.jvp(self.code, (self.X,), (self.TANGENT,))

    def test_what_the_error_advises_is_right(self) -> None:
        def plain(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x * 2) * x.sin()

        wanted = torch.func.jvp(plain, (self.X,), (self.TANGENT,))
        torch.testing.assert_close(torch.autograd.functional.jvp(self.code, self.X, self.TANGENT), wanted)
