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


def test_generation_through_a_cuda_graph_gives_the_tokens_of_eager() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
                                  num_attention_heads=8, num_key_value_heads=2, vocab_size=1000)  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, 1000, (1, 24), device="cuda")
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "cache_implementation": "static",
               "pad_token_id": 0, "disable_compile": True}  # fmt: skip
    torch._dynamo.reset()
    with torch.no_grad():
        first = model.generate(ids, **options)
        model.forward = torch.compile(model.forward, backend=tilegym_fx_backend, mode="reduce-overhead")
        second = model.generate(ids, **options)
    assert first.tolist() == second.tolist()
    assert last_report().chosen
