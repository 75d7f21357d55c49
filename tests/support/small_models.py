"""The models of the shipped table at sizes that a test can run, one layer of each kind, weights that all count."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilegym_fx.breadth.shrink import layers_only, tiny
from tilegym_fx.breadth.steps import randomize
from tilegym_fx.export import build
from tilegym_fx.model_source import configuration, resolve_model, shipped_models

MODELS = tuple(shipped_models())


def small_config(name: str, **changes: Any) -> Any:
    """The configuration of a model of the table with every width shrunk."""
    fields = resolve_model(name).config.to_dict()
    model_type = fields.pop("model_type")
    return configuration(model_type, {**fields, **tiny(fields), **changes})


def small(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Such a model on the CPU, in eval mode."""
    return randomized(build(small_config(name, **changes), dtype, device="cpu"))


def true_widths(name: str, **changes: Any) -> nn.Module:
    """One layer of each kind at the model's own widths, with a few tokens and experts to keep it in memory."""
    return randomized(build(true_config(name, **changes), torch.float32, device="cpu"))


def true_config(name: str, **changes: Any) -> Any:
    """The configuration of such a model."""
    fields = resolve_model(name).config.to_dict()
    model_type = fields.pop("model_type")
    few = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {key: 8 for key in ("num_local_experts", "num_experts") if fields.get(key)}
    return configuration(model_type, {**fields, **layers_only(fields), **few, **experts, **changes})


def randomized(model: nn.Module) -> nn.Module:
    """The same model with weights under which no part of it drowns in another."""
    randomize(model)
    return model
