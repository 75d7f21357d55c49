"""What is asked of a live model before anything is done: where it is, whether it speaks, what it is called with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .ops import usual_device

#: Positional and keyword arguments of a model.
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: Rows of a prompt that is captured or verified, and the most tokens of one that is captured.
BATCH, _SEQ = 2, 256


def split_inputs(inputs: Any) -> Call:
    """``inputs=`` as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, list | tuple) else ((inputs,), {})


def names_in(option: str, given: Any) -> tuple[str, ...] | None:
    """``only=`` or ``skip=`` as names of Definitions, read once: they may come from a generator; a string is one name.

    Raises:
        UsageError: If it is anything else.
    """
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not all(isinstance(name, str) for name in names) or not isinstance(given, Iterable):
        raise UsageError(f"{option}={given!r} is no list of names of Definitions", advice=f'Give {option}=["rms_norm"]')
    return names


def is_language_model(model: nn.Module) -> bool:
    """Whether the module is a transformers model that gives logits for token ids."""
    speaks: Any = model
    return hasattr(model, "config") and hasattr(model, "generate") and speaks.get_output_embeddings() is not None


def sample_length(model: nn.Module) -> int:
    """How many tokens of a prompt are captured: no more than the model has positions for."""
    config: Any = model.config
    limits = [getattr(config, name, None) for name in ("n_positions", "max_position_embeddings")]
    return max(8, min([_SEQ, *(limit // 2 for limit in limits if isinstance(limit, int) and limit > 0)]))


def model_device(model: nn.Module) -> torch.device:
    """Where a model is; the usual device for one without weights."""
    return next((p.device for p in model.parameters()), usual_device())


def is_meta(model: nn.Module) -> bool:
    """Whether a model has no numbers in its weights."""
    return any(p.is_meta for p in model.parameters())
