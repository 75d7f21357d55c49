"""Layers that look alike and are not, for reasons that their attributes do not tell of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reasons import unnumbered
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tilegym_fx.layer_runs import watching
from tilegym_fx.layers import Copies
from tilegym_fx.live import kernelize, restore
from tilegym_fx.planner import plan_source_form

pytestmark = pytest.mark.filterwarnings("ignore:tilegym_fx")
WIDTH = 16
ACTS = (functional.silu,) * 4 + (functional.relu,) * 4
OF_MODULE: dict[int, Any] = {}


class Layer(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        OF_MODULE[id(self)] = ACTS[place]
        self.up, self.gate = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.gate(x)) * self.up(x)


class ByTable(Layer):
    acts = ACTS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.acts[self.place](self.gate(x)) * self.up(x)


class ByGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + OF_MODULE[id(self)](self.gate(x)) * self.up(x)


class ByProperty(Layer):
    @property
    def act(self) -> Any:
        return ACTS[self.place]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.gate(x)) * self.up(x)


class ByAttributeThatIsNotThere(Layer):
    def __getattr__(self, name: str) -> Any:
        return ACTS[self.place] if name == "act" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.gate(x)) * self.up(x)


class OtherBranch(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if OF_MODULE[id(self)] is functional.relu:
            return x + functional.gelu(self.gate(x), approximate="tanh") * self.up(x)
        return x + functional.silu(self.gate(x)) * self.up(x)


class OtherWeights(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.gate, self.up) if OF_MODULE[id(self)] is functional.silu else (self.up, self.gate)
        return x + functional.silu(gate(x)) * up(x)


class Told(Layer):
    def forward(self, x: torch.Tensor, act: Any = functional.silu) -> torch.Tensor:
        return x + act(self.gate(x)) * self.up(x)


class Deep(nn.Module):
    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(place) for place in range(8))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def norm(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Tells(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x, ACTS[place])
        return x


class EndsEarly(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:5]:
            x = layer(x)
        return x


class LeavesOut(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x) if place not in (4, 6) else x
        return x


class NothingIfShort(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(self.layers) == 8 else x


class BeforeTheLast(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x[:2])


class CountsInNumbers(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x), 1 / math.sqrt(len(self.layers)))


class ComputesBetween(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x), 1e-6)
        return x


class CallsForward(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:5]:
            x = layer.forward(x)
        return x


class WithNorms(Deep):
    """A list that is gone through side by side with another, which has more kinds of layers."""

    def __init__(self, *eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=e) for e in eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = norm(layer(x))
        return x


class HeldByOneself(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.own = list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.own:
            x = layer(x)
        return x


UNLIKE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        layer.__name__: (lambda layer=layer: Deep(layer), "layers.4 does something else than layers.1")  # type: ignore[misc]
        for layer in (ByTable, ByGlobal, ByProperty, ByAttributeThatIsNotThere, OtherBranch, OtherWeights)
    },
    "Tells": (lambda: Tells(Told), "layers.4 does something else than layers.1"),
    "EndsEarly": (EndsEarly, "layers.5 does something else than layers.1"),
    "LeavesOut": (LeavesOut, "layers.4 does something else than layers.1"),
    "NothingIfShort": (NothingIfShort, "layers.0 does something else where only the first layers are there"),
    "BeforeTheLast": (BeforeTheLast, "layers.2 does something else where only the first layers are there"),
    "CountsInNumbers": (CountsInNumbers, "the code around the layers does something else"),
    "ComputesBetween": (ComputesBetween, "the code around the layers does something else"),
    "CallsForward": (CallsForward, "the code around the layers does something else"),
    "WithNorms": (lambda: WithNorms(*[1e-6] * 4, *[1e-5] * 4), "norms.3 does something else where only"),
    "HeldByOneself": (HeldByOneself, "layers.3 does something else than layers.1"),
}


def tries(model: nn.Module) -> Any:
    """The report of a model that gives the same numbers, and has the same text and counts, as if captured whole."""
    x = torch.randn(4, 6, WIDTH)
    (made, found), (whole, expected) = (plan_source_form(model, inputs=x, whole=why) for why in ("", "asked for"))
    assert made.text == whole.text
    assert made.text
    assert found.counts() == expected.counts()
    assert unnumbered(found.misses()) == unnumbered(expected.misses())
    assert found.estimates["call"].counts() == expected.estimates["call"].counts()
    assert found.estimates["call"].others == pytest.approx(expected.estimates["call"].others)
    before = model(x)
    torch.testing.assert_close(kernelize(model, inputs=x, verify=False)(x), before)
    restore(model)
    return found


@pytest.mark.parametrize("name", UNLIKE)
def test_layers_that_do_something_else_are_captured_themselves(name: str) -> None:
    torch.manual_seed(0)
    make, why = UNLIKE[name]
    found = tries(make().eval())
    assert not found.copied
    assert why in found.whole


class GoesOnAtTheEnd(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-2]:
            x = layer(x)
        return self.layers[-2](self.layers[-1](x))


class LooksPerLayer(Deep):
    """Its own code only takes views for each layer."""

    def __init__(self) -> None:
        super().__init__(Told)
        self.scales = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales.unbind(0), strict=False):
            x = layer(x, lambda y, scale=scale: functional.silu(y) * scale)
        return x


class HoldsTheList(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.lists = [self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.lists[0]:
            x = layer(x)
        return x


class ThreeTimesTheLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(place) for place in range(8)))
        self.layers.register_forward_hook(lambda module, args, result: 3 * result)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


LIKE: dict[str, Callable[[], nn.Module]] = {
    "Deep": Deep,
    "GoesOnAtTheEnd": GoesOnAtTheEnd,
    "HoldsTheList": HoldsTheList,
    "ThreeTimesTheLast": ThreeTimesTheLast,
    "WithNorms": lambda: WithNorms(*[1e-6] * 8),
}


@pytest.mark.parametrize("name", LIKE)
def test_layers_that_do_the_same_stand_for_each_other(name: str) -> None:
    torch.manual_seed(0)
    found = tries(LIKE[name]().eval())
    assert found.copied
    assert not found.whole


def test_views_of_what_is_there_for_each_layer_are_no_difference() -> None:
    found = plan_source_form(LooksPerLayer().eval(), inputs=torch.randn(4, WIDTH))[1]
    assert not found.whole


class Attends(nn.Module):
    """Reads what all layers read, or its own input, with three linears."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = x * linear(memory)
        return x


class Attending(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.layers = nn.ModuleList(Attends() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x
        for layer in self.layers:
            x = layer(x, x if self.own else memory)
        return x


@pytest.mark.parametrize("own", [False, True])
def test_a_place_that_takes_from_several_layers_side_by_side_is_looked_for_in_all(own: bool) -> None:
    x = torch.randn(4, WIDTH)
    model = Attending(own).eval()
    found, expected = (plan_source_form(model, inputs=x, whole=whole)[1] for whole in ("", "asked for"))
    assert bool(found.copied) == own
    assert ("linear_qkv takes operations of layers." in found.whole) == (not own)
    assert "linear_qkv" in found.graph_form["call"].counts()
    assert found.graph_form["call"].counts() == expected.graph_form["call"].counts()


class Box:
    def __init__(self) -> None:
        self.held = torch.ones(WIDTH)


class Fills(Deep):
    def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
        box.held = super().forward(x)
        return box.held


def test_what_a_call_is_given_is_as_before() -> None:
    box = Box()
    kernelize(Fills().eval(), inputs={"x": torch.randn(4, WIDTH), "box": box})
    assert not isinstance(box.held, FakeTensor)


def test_a_run_that_fails_leaves_no_hook() -> None:
    before = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    model = Deep()
    with pytest.raises(RuntimeError), watching(Copies.in_model(model)) as runs:
        model(torch.randn(3, WIDTH + 1))
    assert runs.of_layer["layers.0"]
    assert before == (len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks))
