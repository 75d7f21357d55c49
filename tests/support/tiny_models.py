"""The models of the shipped table at sizes that a CPU runs in a moment, and what they compute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_fx.breadth.shrink import layers_only, tiny
from tilegym_fx.breadth.steps import randomize
from tilegym_fx.export import build, cache_of
from tilegym_fx.model_source import configuration, resolve_model, shipped_models

STEPS = 8
Outputs = dict[str, torch.Tensor]


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> nn.Module:
    """A model of the shipped table, or of a model type, with every kind of its layers and random weights."""
    model = build(_config(name, tiny, fields), dtype, device="cpu")
    randomize(model)
    return model.eval()


def wide_config(name: str) -> Any:
    """A model of the shipped table at its true widths, with two layers or one of each kind."""
    return _config(name, layers_only, {})


def _config(name: str, shrink: Any, fields: dict[str, Any]) -> Any:
    config = resolve_model(name).config
    known = {k: v for k, v in shipped_models().get(name, {}).items() if k != "model_type"}
    return configuration(config.model_type, {**known, **shrink(config.to_dict()), **fields})


def token_ids(model: nn.Module, batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Tokens that mean nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator)


def left_padding(ids: torch.Tensor) -> torch.Tensor:
    """The attention mask of a batch whose first row is shorter than the others by a third."""
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    return mask


def run(model: nn.Module, steps: int = STEPS) -> Outputs:
    """Logits of a prompt, of cached steps after it, and of both with padding on the left of one row."""
    ids = token_ids(model)
    with torch.no_grad():
        return {**_run(model, ids, None, steps), **_run(model, ids, left_padding(ids), 2)}


def _run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, steps: int) -> Outputs:
    outputs, tokens, cache = {}, ids, {}
    for step in range(steps + 1):
        given = {} if mask is None else {"attention_mask": mask}
        result = model(input_ids=tokens, use_cache=True, **given, **cache)
        name = ("" if mask is None else "padded ") + (f"decode {step}" if step else "prefill")
        outputs[name] = result.logits if mask is None else result.logits[mask[:, -tokens.shape[1] :].bool()]
        held, kept = cache_of(model, result)
        cache, tokens = {held: kept}, ids[:, step % ids.shape[1], None]
        mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
    return outputs


def assert_same_logits(before: Outputs, after: Outputs) -> None:
    """As far apart as the order of additions in float32 brings them, and no farther."""
    assert before.keys() == after.keys()
    for call, expected in before.items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(
            after[call], expected, rtol=0, atol=2e-5 * max(1.0, largest), msg=lambda m, c=call: f"{c}: {m}"
        )


class OpCounter(TorchDispatchMode):
    """Counts the calls of our ops while it is entered: what really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilegym_fx":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def ops_called(model: nn.Module, *, steps: int = 1) -> dict[str, int]:
    """Our ops that a prompt and a cached step run, with how often."""
    with torch.no_grad(), OpCounter() as counter:
        _run(model, token_ids(model), None, steps)
    return dict(sorted(counter.calls.items()))
