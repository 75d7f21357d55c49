"""`kernelize` as a user calls it, on a GPU: the prompt, steps and padding that it verifies all end and agree."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, randomized, small, true_config

from tilegym_fx import kernelize, ops, report
from tilegym_fx.export import build

pytestmark = pytest.mark.gpu

#: One layer of each kind at the model's own widths, which decide the tiles.
WIDE = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "microsoft/Phi-3-mini-4k-instruct", "google/gemma-3-4b-it (text)",
        "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite")  # fmt: skip


def is_verified(model: torch.nn.Module) -> None:
    before = dict(ops.fallbacks())
    kernelize(model, strict=True)
    found = report(model)
    assert found.checks
    assert all(check.passed for check in found.checks)
    assert dict(ops.fallbacks()) == before, "a kernel was not used"


@pytest.mark.parametrize("name", WIDE)
def test_a_layer_at_its_own_widths(name: str) -> None:
    is_verified(randomized(build(true_config(name), torch.bfloat16, device="cpu")).to("cuda"))


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model(name: str) -> None:
    is_verified(small(name, torch.bfloat16).to("cuda"))


@pytest.mark.parametrize("length", [5, 13, 16, 33])
def test_steps_under_padding_end_at_every_length(length: int) -> None:
    """A mask's rows are read in another way where their length is a multiple of 16."""
    model = small("meta-llama/Llama-3.1-8B", torch.float32).to("cuda")
    ids = torch.randint(3, model.config.vocab_size, (2, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    given = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **given)
    assert torch.equal(kernelize(model, strict=True).generate(ids, **given), expected)
