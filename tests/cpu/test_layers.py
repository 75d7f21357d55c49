"""Layers that are alike but for the numbers in their weights: which they are, and which of them a capture sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tilegym_fx.layers import Copies, first_layers


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


def copies_of(model: nn.Module) -> Copies:
    with first_layers(model) as copies:
        return copies


def test_the_second_layer_stands_for_those_that_are_not_seen() -> None:
    model = Deep()
    whole = model.layers
    with first_layers(model) as copies:
        assert list(model.layers) == list(whole[:3])
    assert model.layers is whole
    assert copies.alike == (("layers.0", "layers.1", "layers.2"),)
    assert copies.of("layers.1") == ("layers.3", "layers.4", "layers.5")
    assert copies.of("layers.1.inner") == ("layers.3.inner", "layers.4.inner", "layers.5.inner")
    assert copies.of("layers.0") == copies.of("layers.10") == copies.of("") == ()


def test_lists_are_whole_again_even_where_the_capture_fails() -> None:
    model = Deep()
    whole = model.layers
    with pytest.raises(ZeroDivisionError), first_layers(model):
        raise ZeroDivisionError
    assert model.layers is whole


def test_every_kind_is_seen_twice_and_one_layer_more() -> None:
    model = Deep(12)
    for place in (2, 5, 8, 11):
        model.layers[place].window = 0
    with first_layers(model) as copies:
        assert len(model.layers) == 7
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
    with first_layers(model) as copies:
        assert len(model.layers) == (5 if what != "place" else 8)
    assert "layers.3" not in copies.of("layers.1")


def test_numbers_in_weights_make_no_difference() -> None:
    model = Deep()
    nn.init.zeros_(model.layers[1].inner.weight)
    assert copies_of(model)


def test_a_list_of_few_or_of_unlike_layers_is_seen_whole() -> None:
    assert not copies_of(Deep(3))
    model = Deep()
    for place, layer in enumerate(model.layers):
        layer.window = place * place
    assert not copies_of(model)


def test_a_layer_that_stands_in_a_list_twice_is_seen_in_both_places() -> None:
    layer = nn.Linear(8, 8)
    assert not copies_of(nn.Sequential(nn.ModuleList([layer] * 6)))


def test_lists_inside_of_lists_are_seen_whole_where_the_outer_one_is_seen_in_part() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    def paths(count: int) -> list[str]:
        model = nn.Module()
        model.stages = nn.ModuleList(stage() for _ in range(count))
        return [short.path for short in copies_of(model).lists]

    assert paths(4) == ["stages"]
    assert paths(2) == ["stages.0", "stages.1"]
