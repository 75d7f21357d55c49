"""The torch.compile backend on a Llama of 4 layers at 8B width, and generation through a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tilegym_fx import ops

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
        compiled = torch.compile(model, backend="tilegym_fx", options={"inner": inner})
        ours = compiled(ids).logits.float()
        judge = copy.deepcopy(model).float()(ids).logits
    own, error = (original - judge).norm() / judge.norm(), (ours - judge).norm() / judge.norm()
    assert error <= 1.5 * own, (error, own)
    assert dict(ops.fallbacks()) == before


def test_generation_with_a_static_cache_gives_the_tokens_of_eager(model: torch.nn.Module) -> None:
    wide = model
    ids = torch.randint(3, 128256, (1, 24), device="cuda")
    torch._dynamo.reset()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    with torch.no_grad():
        first = wide.generate(ids, **options, disable_compile=True)
        forward = wide.forward
        wide.forward = torch.compile(forward, backend="tilegym_fx", mode="reduce-overhead")
        try:
            second = wide.generate(ids, **options, disable_compile=True)
        finally:
            wide.forward = forward
    agreed = (first == second)[:, ids.shape[1] :].float().mean()
    assert agreed >= 0.5, "random weights give near ties, but not everywhere"
