"""Runs a tiny model as generation does, on weights that make every part of it count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ExportError
from ..export import MODEL_ERRORS, cache_of
from ..verify import sample_inputs

_STEPS = 4
Logits = dict[str, torch.Tensor]


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give the parameters values of a size at which no part of the model drowns in another.

    Models initialise to small weights, under which a wrong attention moves the logits by less than a rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_((0.1 * noise).to(parameter.dtype))


def run_steps(model: nn.Module) -> Logits:
    """Logits of a prompt and of four more tokens: against the cache, or with the prompt again where there is none."""
    ids = sample_inputs(model, batch=2)["input_ids"]
    with torch.no_grad():
        result = model(input_ids=ids, use_cache=True) if _keeps_cache(model) else model(input_ids=ids)
        outputs = {"prefill": result.logits}
        try:
            outputs |= _cached(model, ids, result)
        except (ExportError, *MODEL_ERRORS):  # it takes the whole prompt each time
            outputs |= _uncached(model, ids)
    return outputs


def _keeps_cache(model: nn.Module) -> bool:
    return bool(getattr(model.config, "use_cache", True))


def _cached(model: nn.Module, ids: torch.Tensor, result: Any) -> Logits:
    outputs = {}
    for step in range(_STEPS):
        name, cache = cache_of(model, result)
        result = model(input_ids=ids[:, step, None], use_cache=True, **{name: cache})
        outputs[f"decode {step + 1}"] = result.logits
    return outputs


def _uncached(model: nn.Module, ids: torch.Tensor) -> Logits:
    outputs = {}
    for step in range(_STEPS):
        ids = torch.cat([ids, ids[:, step, None]], dim=-1)
        outputs[f"longer prompt {step + 1}"] = model(input_ids=ids).logits
    return outputs


def difference(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    """Largest difference over all calls, over the largest logit; infinite where one is not finite alone."""
    largest = max(float(logits.float().abs().nan_to_num(0.0, 0.0, 0.0).max()) for logits in before.values())
    worst = 0.0
    for step, logits in before.items():
        known = torch.isfinite(logits)
        if not torch.equal(known, torch.isfinite(after[step])):
            return float("inf")
        if known.any():
            worst = max(worst, float((logits.float() - after[step].float())[known].abs().max()))
    return worst / largest if largest else worst
