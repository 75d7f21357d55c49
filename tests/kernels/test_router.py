"""The router kernel against float64, through the interpreter and, marked gpu, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = (
    "router_softmax_topk", "router_softmax_topk_fp32", "router_softmax_topk_norm",
    "router_softmax_topk_norm_fp32", "router_topk_softmax",
)  # fmt: skip
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SIZES = ({"N": 70, "E": 60}, {"N": 1, "E": 128}, {"N": 3, "E": 3}, {"N": 33, "E": 8})


def on(device: str, name: str) -> Any:
    def run(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        return tuple(r.cpu() for r in INVENTORY.entry_point(name)(logits.to(device), k))

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64_for_every_number_of_experts(name, dtype, device):
    for sizes in SIZES:
        for k in {1, 3, min(8, sizes["E"])}:
            inputs = {**make_inputs(name, dtype, "ordinary", "as trained", sizes), "k": k}
            assert worst(on(device, name), name, inputs, dtype) <= 1


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_each_is_chosen_once(device):
    for name in NAMES:
        weights, index = on(device, name)(torch.zeros(5, 12), 4)
        assert index.tolist() == [[0, 1, 2, 3]] * 5
        torch.testing.assert_close(weights, torch.full((5, 4), 0.25 if "norm" in name or "topk_s" in name else 1 / 12))


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_exclude_an_expert_never_choose_it_before_others(device):
    logits = torch.randn(6, 10)
    logits[:, 3] = -torch.inf
    weights, index = on(device, "router_softmax_topk_norm")(logits, 9)
    assert not (index == 3).any()
    assert weights.isfinite().all()


def test_no_tokens_launch_nothing():
    with recorded() as launches:
        weights, index = INVENTORY.entry_point("router_softmax_topk")(torch.randn(0, 8), 2)
    assert weights.shape == index.shape == (0, 2)
    assert launches == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch):
    place = ARCHITECTURES.index(arch)
    for name in NAMES[place % 3 : place % 3 + 3 : 2]:
        with recorded() as launches:
            INVENTORY.entry_point(name)(torch.empty(2048, 128, dtype=DTYPES[place % 3], device="meta"), 8)
        assert compile_kernel(launches[0].kernel, launches[0].args, arch)
