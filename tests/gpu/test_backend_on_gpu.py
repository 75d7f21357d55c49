"""The torch.compile backend on a Llama of 4 layers at 8B width, and generation through a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tilegym_fx import last_report, ops
from tilegym_fx.backend import tilegym_fx_backend

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
                                  num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("length", [1, 300])
def test_logits_are_as_near_to_float32_as_the_original(model: torch.nn.Module, inner: str, length: int) -> None:
    import copy

    ids = torch.randint(0, 128256, (1, length), device="cuda")
    torch._dynamo.reset()
    before = dict(ops.fallbacks())
    with torch.no_grad():
        original = model(ids).logits.float()
        compiled = torch.compile(model, backend=tilegym_fx_backend, options={"inner": inner})
        ours = compiled(ids).logits.float()
        judge = copy.deepcopy(model).float()(ids).logits
    own, error = (original - judge).norm() / judge.norm(), (ours - judge).norm() / judge.norm()
    assert error <= 1.5 * own, (error, own)
    assert dict(ops.fallbacks()) == before


def test_steps_through_a_cuda_graph_are_those_of_eager(model: torch.nn.Module) -> None:
    from transformers import StaticCache

    prompt = torch.randint(0, 128256, (1, 24), device="cuda")
    tokens = torch.randint(0, 128256, (6, 1, 1), device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tilegym_fx", mode="reduce-overhead")
    logits = []
    for forward in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            steps = []
            for step, token in enumerate(tokens):
                torch.compiler.cudagraph_mark_step_begin()
                position = torch.tensor([[24 + step]], device="cuda")
                steps.append(forward(token, past_key_values=cache, position_ids=position).logits.clone())
        logits.append(torch.stack(steps).float())
    eager, ours = logits
    assert (ours - eager).norm() / eager.norm() < 2e-2
    assert (ours[0] - ours[-1]).norm() / eager.norm() > 0.1, "a replay must not give the first step again"
    assert last_report().chosen
