"""Layers that are alike but for the numbers in their weights: which they are, and which of them a capture sees."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tilegym_fx.layers import Copies


class Layer(nn.Module):
    """A layer that knows its place, has a plain attribute, and shares an object with the others."""

    def __init__(self, place: int, shared: object) -> None:
        super().__init__()
        self.place, self.window, self.config = place, 4, shared
        self.inner = nn.Linear(8, 8, bias=False)
        self.register_buffer("table", torch.ones(3))
        self.act, self.way = partial(nn.functional.gelu, approximate="tanh"), self.one_way

    def one_way(self) -> None:
        pass

    def other_way(self) -> None:
        pass


class Deep(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        shared = object()
        self.layers = nn.ModuleList(Layer(place, shared) for place in range(count))


def seen(model: Any) -> int:
    """How many layers a capture sees."""
    with Copies.in_model(model).left_out():
        return len(model.layers)


def test_the_second_layer_stands_for_those_that_are_not_seen() -> None:
    model = Deep()
    whole, copies = list(model.layers), Copies.in_model(model)
    with copies.left_out():
        assert list(model.layers) == whole[:3]
    assert list(model.layers) == whole
    assert copies.of("layers.1") == ("layers.3", "layers.4", "layers.5")
    assert copies.of("layers.1.inner") == ("layers.3.inner", "layers.4.inner", "layers.5.inner")
    assert copies.of("layers.0") == copies.of("layers.10") == copies.of("") == ()


def test_lists_are_whole_again_even_where_the_capture_fails() -> None:
    model = Deep()
    whole = list(model.layers)
    with pytest.raises(KeyboardInterrupt), Copies.in_model(model).left_out():
        raise KeyboardInterrupt
    assert list(model.layers) == whole


def test_every_kind_is_seen_twice_and_one_layer_more() -> None:
    model = Deep(12)
    for place in (2, 5, 8, 11):
        model.layers[place].window = 0
    assert seen(model) == 7
    copies = Copies.in_model(model)
    assert copies.of("layers.1") == ("layers.7", "layers.9", "layers.10")
    assert copies.of("layers.5") == ("layers.8", "layers.11")


def hooked(layer: Any) -> None:
    layer.inner.register_forward_hook(lambda *_: None)


def tied(layer: Any) -> None:
    layer.second = layer.inner


#: What makes one layer unlike the others.
CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda layer: setattr(layer, "window", 5),
    "type of an attribute": lambda layer: setattr(layer, "window", 4.0),
    "attribute more": lambda layer: setattr(layer, "more", 1),
    "object": lambda layer: setattr(layer, "config", object()),
    "function": lambda layer: setattr(layer, "act", partial(nn.functional.gelu, approximate="none")),
    "method": lambda layer: setattr(layer, "way", layer.other_way),
    "method of another": lambda layer: setattr(layer, "way", Layer(0, None).one_way),
    "own forward": lambda layer: setattr(layer.inner, "forward", lambda x: x),
    "place": lambda layer: setattr(layer, "place", 17),
    "shape": lambda layer: setattr(layer, "inner", nn.Linear(8, 9, bias=False)),
    "bias": lambda layer: setattr(layer, "inner", nn.Linear(8, 8)),
    "dtype": lambda layer: layer.inner.to(torch.bfloat16),
    "gradient": lambda layer: layer.inner.requires_grad_(False),
    "class": lambda layer: setattr(layer, "inner", nn.Identity()),
    "mode": lambda layer: layer.inner.eval(),
    "buffer": lambda layer: setattr(layer, "table", torch.ones(4)),
    "hook": hooked,
    "one module twice": tied,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_layer_that_differs_is_of_a_kind_of_its_own(what: str) -> None:
    model = Deep(8)
    CHANGES[what](model.layers[3])
    assert seen(model) == (5 if what != "place" else 8)
    assert "layers.3" not in Copies.in_model(model).of("layers.1")


def test_numbers_in_weights_make_no_difference() -> None:
    model = Deep()
    nn.init.zeros_(model.layers[1].inner.weight)
    assert Copies.in_model(model)


def test_a_list_of_few_or_of_unlike_layers_is_seen_whole() -> None:
    assert not Copies.in_model(Deep(3))
    model = Deep()
    for place, layer in enumerate(model.layers):
        layer.window = place * place
    assert not Copies.in_model(model)


def test_a_layer_that_stands_in_a_list_twice_is_seen_in_both_places() -> None:
    layer = nn.Linear(8, 8)
    assert not Copies.in_model(nn.Sequential(nn.ModuleList([layer] * 6)))


def test_lists_inside_of_lists_are_seen_whole_where_the_outer_one_is_seen_in_part() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    def paths(count: int) -> list[str]:
        model = nn.Module()
        model.stages = nn.ModuleList(stage() for _ in range(count))
        return [next(iter(short.layers)) for short in Copies.in_model(model).lists]

    assert paths(4) == ["stages.0"]
    assert paths(2) == ["stages.0.0", "stages.1.0"]


def test_layers_of_two_kinds_keep_their_places_each_in_a_part_of_its_own() -> None:
    model = Deep(8)
    for place in (1, 3, 5, 7):
        model.layers[place].inner = Layer(place, None)
        model.layers[place].inner.config = None
    for layer in model.layers:
        layer.way = None
    assert Copies.in_model(model).of("layers.2") == ("layers.6",)
    assert Copies.in_model(model).of("layers.3") == ("layers.5", "layers.7")
    model.layers[5].inner.place = 6
    assert not Copies.in_model(model)


def test_layers_are_called_what_their_list_calls_them() -> None:
    model = nn.Module()
    model.layers = nn.Sequential(OrderedDict((f"layer{place}", Layer(place, None)) for place in range(5)))
    for layer in model.layers:
        layer.way = None
    assert Copies.in_model(model).of("layers.layer1.inner") == ("layers.layer3.inner", "layers.layer4.inner")


def test_a_list_stays_the_same_object_with_its_hooks_and_its_owner_is_not_told() -> None:
    class Frozen(Deep):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name not in vars(self).get("_modules", ())
            super().__setattr__(name, value)

    model = Frozen()
    whole = model.layers
    whole.register_forward_hook(lambda *_: None)
    with Copies.in_model(model).left_out():
        assert model.layers is whole
        assert len(whole) == 3


def another_name(model: Any) -> None:
    model.blocks = model.layers


def last(model: Any) -> None:
    model.last = model.layers[-1]


def part_elsewhere(model: Any) -> None:
    model.head = model.layers[4].inner


def part_of_two_layers(model: Any) -> None:
    model.layers[4].inner = model.layers[1].inner


def nothing_there(model: Any) -> None:
    model.layers._modules["6"] = None


@pytest.mark.parametrize("change", [another_name, last, part_elsewhere, part_of_two_layers, nothing_there])
def test_a_list_with_something_that_is_held_elsewhere_too_is_seen_whole(change: Callable[[Any], None]) -> None:
    model = Deep()
    assert Copies.in_model(model)
    change(model)
    assert not Copies.in_model(model)


def test_weights_may_be_tied_across_layers() -> None:
    model = Deep()
    for layer in model.layers:
        layer.inner.weight = model.layers[0].inner.weight
    assert Copies.in_model(model)
