"""Routed experts with torch's grouped products in them, as prompts have them, through the interpreter and on a GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inputs import DTYPES, INVENTORY, make_inputs, worst

from tilegym_fx.compile import ARCHITECTURES, compile_kernel
from tilegym_fx.recording import recorded

NAMES = ("experts_clamped", "experts_silu", "experts_silu_fp32")
#: More and fewer rows than 16 an expert, one token, experts without any, ragged tiles.
SIZES = (
    {"N": 1, "K": 2, "E": 7, "H": 64, "I": 48}, {"N": 37, "K": 3, "E": 3, "H": 136, "I": 80},
    {"N": 150, "K": 1, "E": 2, "H": 40, "I": 72}, {"N": 3, "K": 2, "E": 4, "H": 16, "I": 1096},
)  # fmt: skip


def module_of(name: str) -> ModuleType:
    return sys.modules[INVENTORY.entry_point(name).__module__]


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Makes prompts of all calls; the ends that torch's product was given."""
    given: list[torch.Tensor] = []
    own = F.grouped_mm

    def grouped_mm(*args: Any, offs: torch.Tensor) -> torch.Tensor:
        given.append(offs)
        return own(*args, offs=offs)

    for name in NAMES:
        monkeypatch.setattr(module_of(name), "torch_groups", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    return given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, by_torch):
    for sizes in SIZES:
        for rows in ("ordinary", "large"):
            inputs = make_inputs(name, dtype, rows, "as trained", sizes)
            assert worst(INVENTORY.entry_point(name), name, inputs, dtype) <= 1
    assert len(by_torch) == 4 * len(SIZES)


def test_the_tanh_form_of_gelu(by_torch, monkeypatch):
    kernels = module_of("experts_silu")
    inputs = make_inputs("experts_silu", torch.float32, "ordinary", "as trained", {"N": 30, "K": 2})
    got = kernels.experts_gelu_tanh(**inputs)
    monkeypatch.setattr(kernels, "torch_groups", lambda *_: False)
    torch.testing.assert_close(got, kernels.experts_gelu_tanh(**inputs))
    assert len(by_torch) == 2


@pytest.mark.parametrize("name", NAMES)
def test_experts_that_there_are_not_are_neither_read_nor_written(name, by_torch):
    inputs = make_inputs(name, torch.float32, "ordinary", "as trained", {"N": 12, "K": 2, "E": 5})
    inputs["top_k_index"][0, 0], inputs["top_k_index"][1, 1] = 99, -3
    result = INVENTORY.entry_point(name)(**inputs)
    assert result.shape == inputs["hidden_states"].shape
    assert result[2:].isfinite().all()
    assert [ends[-1] for ends in by_torch] == [22, 22]


def test_the_bias_of_a_row_is_that_of_its_own_expert(by_torch):
    """With matrices of zeros nothing else is left."""
    inputs = make_inputs("experts_clamped", torch.float32, "ordinary", "as trained", {"N": 9, "K": 2, "E": 3, "I": 8})
    inputs["down_proj"].zero_()
    got = INVENTORY.entry_point("experts_clamped")(**inputs)
    added = inputs["down_proj_bias"][inputs["top_k_index"]] * inputs["top_k_weights"][..., None]
    torch.testing.assert_close(got, added.sum(1))


def made_for(name: str, tokens: int, device: str) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    inputs = make_inputs(name, torch.bfloat16, "ordinary", "as trained", {"N": tokens, "K": 2, "E": 4, "I": 64})
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return INVENTORY.entry_point(name), moved


@pytest.mark.parametrize("name", NAMES)
def test_prompts_alone_have_products_of_torch(name, monkeypatch):
    monkeypatch.setattr(module_of("grouped_linear"), "has_grouped_kernel", lambda device: True)
    for tokens, products in ((32, 2), (33, 0)):
        function, inputs = made_for(name, tokens, "meta")
        with recorded() as launches:
            function(**inputs)
        own = [made for made in launches if "EXPERTS" in inspect.signature(made.kernel._pyfunc).parameters]
        assert len(own) == products
    other = {k: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with recorded() as launches:
        function(**other)
    assert len(launches) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_a_prompt_is_torchs_and_a_step_is_ours(name, device, monkeypatch):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has no grouped kernel for this GPU")
    calls: list[int] = []
    own = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **named: calls.append(1) or own(*args, **named))
    for tokens, products in ((32, 0), (33, 2)):
        function, inputs = made_for(name, tokens, device)
        calls.clear()
        assert worst(lambda f=function, given=inputs, **_: f(**given).cpu(), name,
                     {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()},
                     torch.bfloat16) <= 1  # fmt: skip
        assert len(calls) == products


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_can_be_captured_in_a_cuda_graph(name, device):
    function, inputs = made_for(name, 100, device)
    expected = function(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**inputs)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(arch, by_torch):
    dtype = torch.bfloat16  # prompts in other dtypes do not come here
    x, index = torch.empty(64, 2880, dtype=dtype, device="meta"), torch.empty(64, 4, dtype=torch.long, device="meta")
    up, down = (torch.empty(8, *s, dtype=dtype, device="meta") for s in ((2880, 5760), (2880, 2880)))
    biases = [torch.empty(8, m.shape[2], dtype=dtype, device="meta") for m in (up, down)]
    with recorded() as launches:
        weights = torch.empty_like(index, dtype=dtype)
        INVENTORY.entry_point("experts_clamped")(x, index, weights, up, biases[0], down, biases[1], 1.702, 7.0)
    assert [made.kernel._pyfunc.__name__ for made in launches] == [
        "experts_sort_kernel", "experts_rows_kernel", "clamped_gate_kernel", "experts_inverse_kernel",
        "biased_combine_kernel",
    ]  # fmt: skip
    for made in launches:
        assert compile_kernel(made.kernel, made.args, arch)
