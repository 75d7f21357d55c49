"""The sigmoid router's kernel against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
CASES = (
    ("router_sigmoid", {"N": 70, "E": 60}, {"k": 4}),
    ("router_sigmoid", {"N": 1, "E": 128}, {"k": 8}),
    ("router_sigmoid", {"N": 3, "E": 3}, {"k": 3}),
    ("router_sigmoid_groups", {"N": 5, "X": 64}, {"groups": 8, "kept": 4, "k": 8}),
    ("router_sigmoid_groups", {"N": 33, "X": 30}, {"groups": 3, "kept": 1, "k": 5}),
    ("router_sigmoid_groups", {"N": 2, "X": 16}, {"groups": 1, "kept": 1, "k": 6}),
)


def on(device: str, name: str) -> Any:
    def run(**inputs: Any) -> tuple[torch.Tensor, ...]:
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return tuple(result.cpu() for result in INVENTORY.entry_point(name)(**given))

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "sizes", "numbers"), CASES)
def test_agrees_with_float64(name, sizes, numbers, dtype, device):
    inputs = {**make_inputs(name, dtype, "ordinary", "as trained", sizes), **numbers}
    assert worst(on(device, name), name, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_moves_the_choice_and_not_the_weights(device):
    logits, bias = torch.zeros(2, 6), torch.tensor([0.0, 0.0, 3.0, 0.0, 2.0, 0.0])
    weights, index = on(device, "router_sigmoid")(logits=logits, bias=bias, k=2, eps=0.0, scale=5.0)
    assert index.tolist() == [[2, 4]] * 2
    assert weights.tolist() == [[2.5, 2.5]] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_best_groups_are_open(device):
    """Expert 0 is the best of all, but its group's two best are worth less than those of the others."""
    logits = torch.tensor([[4.0, -9.0, 1.0, 1.0, 2.0, 2.0]])
    given = {"logits": logits, "bias": torch.zeros(6), "kept": 2, "groups": 3, "k": 4, "eps": 0.0, "scale": 1.0}
    _, index = on(device, "router_sigmoid_groups")(**given)
    assert sorted(index[0].tolist()) == [2, 3, 4, 5]


def test_no_tokens_launch_nothing():
    with recorded() as launches:
        weights, index = INVENTORY.entry_point("router_sigmoid")(torch.randn(0, 8), torch.zeros(8), 2, 0.0, 1.0)
    assert weights.shape == index.shape == (0, 2)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    logits, bias = torch.empty(512, 256, dtype=DTYPES[place % 3], device="meta"), torch.empty(256, device="meta")
    with recorded() as launches:
        if place % 2:
            INVENTORY.entry_point("router_sigmoid")(logits, bias, 8, 1e-20, 2.5)
        else:
            INVENTORY.entry_point("router_sigmoid_groups")(logits, bias, 4, 8, 8, 1e-20, 2.5)
    assert compile_kernel(launches[0].kernel, launches[0].args, arch)
