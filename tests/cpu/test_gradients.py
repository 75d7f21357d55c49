"""A gradient that an author cut or changed stays so, under torch.compile and in a kernelized module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilegym_fx
from tilegym_fx.apply import is_applied
from tilegym_fx.live import kernelize, report
from tilegym_fx.pipeline import Outcome
from tilegym_fx.reports import last_report

Tensor = torch.Tensor


def straight_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def stop_gradient(x: Tensor) -> Tensor:
    return (x * 2).detach() * x


def written_detached(x: Tensor) -> Tensor:
    base = torch.zeros_like(x)
    base[:1].copy_(x[:1])
    return base.detach() * x + base


def detached_in_place(x: Tensor) -> Tensor:
    z = x * 2
    z.detach_()
    return z * x


def copied_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.clone()
    return y * x


def identity_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 1
    return y * x


def returned_without_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    with torch.no_grad():
        y = h * 1
    return y, h


def written_without_gradient(x: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        h.add_(1)
    return h * h


def gate_cut(x: Tensor) -> Tensor:
    return F.silu((x * 3).detach()) * x


def data(x: Tensor) -> Tensor:
    return (x * 2).data * x


def hooked(x: Tensor) -> Tensor:
    h = x * 2
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 10)
    return h * 3


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


def own_backward(x: Tensor) -> Tensor:
    return Rounded.apply(x * 2) * 3


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False) * 2


TRACED = (
    straight_through, stop_gradient, written_detached, detached_in_place, copied_without_gradient,
    identity_without_gradient, returned_without_gradient, written_without_gradient, gate_cut,
)  # fmt: skip
LEFT = {
    data: "such as .data",
    hooked: "register_hook",
    own_backward: "autograd_function_apply",
    checkpointed: "tag_activation_checkpoint",
}


def compiled(code: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(code, backend="tilegym_fx", options={"inner": "eager", "only": ("silu_mul",)})


def trained(code: Callable[[Tensor], Any]) -> list[Any]:
    """The gradient of the sum of all results, and which of them have one."""
    x = torch.tensor([0.3, 1.7], requires_grad=True)
    found = code(x)
    results = found if isinstance(found, tuple) else (found,)
    torch.stack([result.sum() for result in results]).sum().backward()
    return [x.grad, *(result.requires_grad for result in results)]


@pytest.mark.parametrize("code", [*TRACED, *LEFT])
def test_compiled_code_trains_as_it_did(code: Callable[[Tensor], Any]) -> None:
    torch.testing.assert_close(trained(compiled(code)), trained(code))


@pytest.mark.parametrize("code", LEFT)
def test_a_graph_whose_gradient_a_trace_would_lose_is_left_with_a_reason(code: Callable[[Tensor], Any]) -> None:
    trained(compiled(code))
    outcome = tilegym_fx.last_report()
    assert outcome is not None
    assert [LEFT[code] in rejection.reason for rejection in outcome.rejections] == [True]


def taken(outcome: Outcome | None) -> list[str]:
    assert outcome is not None
    return [planned.match.definition for planned in outcome.chosen]


def gate_cut_inside(x: Tensor) -> Tensor:
    return F.silu(x).detach() * x


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_detach_inside_a_region_refuses_it_only_where_it_cuts(requires_grad: bool, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        compiled(gate_cut_inside)(torch.ones(2, requires_grad=requires_grad))
    assert taken(last_report()) == ([] if requires_grad and enabled else ["silu_mul"])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class GateCut(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x).detach()) * self.up(x)


class GateCutInPlace(Gate):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate.detach_()
        return F.silu(gate) * self.up(x)


class WeightsCut(Gate):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.transpose(-1, -2) * 0.5, -1).detach()
        return (weights @ x).transpose(1, 2)


class InputCut(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x.detach()) * self.up(x)


class GateSwitched(Gate):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        gate = F.silu(self.gate(x))
        torch.set_grad_enabled(True)
        y = gate * self.up(x)
        return y


class GateOfHelper(Gate):
    def activated(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(self.gate(x)) * self.up(x)


class GateOfDecorated(GateOfHelper):
    @torch.no_grad()
    def activated(self, x: Tensor) -> Tensor:
        return F.silu(x)


@torch.inference_mode(mode=False)
@torch.no_grad()
def activated(x: Tensor) -> Tensor:
    return F.silu(x)


class GateOfFunction(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return activated(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("module", "used"),
    [
        (Gate, ["linear_silu_mul"]),
        (GateCut, ["linear", "silu_mul"]),
        (GateCutInPlace, ["linear"]),
        (GateSwitched, []),
        (GateOfHelper, ["linear_silu_mul"]),
        (GateOfDecorated, ["linear"]),
        (GateOfFunction, ["linear"]),
        (WeightsCut, []),
        (InputCut, ["linear", "silu_mul"]),
    ],
)
def test_a_kernelized_module_trains_as_it_did(module: type[nn.Module], used: list[str]) -> None:
    torch.manual_seed(0)
    original = module()
    shape = (1, 2, 4, 16) if module is WeightsCut else (3, 16)
    x = torch.randn(*shape)
    rewritten = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernelize(rewritten, inputs=(x,))
    written = report(rewritten).written if is_applied(rewritten) else ()
    assert sorted({each.match.definition for each in written}) == used
    gradients = []
    for each in (original, rewritten):
        leaf = x.clone().requires_grad_()
        each(leaf).square().sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*gradients)
