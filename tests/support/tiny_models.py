"""Causal language models of each family at sizes that a test can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: What a family needs besides, or has under another name.
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": None},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128},
}
#: Names that a family's configuration does not have.
_FOREIGN: dict[str, tuple[str, ...]] = {
    "gpt2": tuple(k for k in SIZES if k.startswith(("hidden", "intermediate", "num"))),
    "gpt_neox": ("num_key_value_heads",),
    "falcon": ("intermediate_size", "num_key_value_heads"),
}


def config_of(family: str, **changes: Any) -> Any:
    """A tiny configuration; every dropout is off by being in eval mode."""
    sizes = {k: v for k, v in SIZES.items() if k not in _FOREIGN.get(family, ())}
    return AutoConfig.for_model(family, **{**sizes, **OWN.get(family, {}), **changes})


def build(family: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    """A model with random weights, norm weights away from 1 and 0, in eval mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
            elif "embed" not in name and "wte" not in name:
                parameter *= 3
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    """Ids that are no special tokens."""
    return torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(batch * length))
