"""One case of one model as a call that can be repeated, with what it gives and how to judge that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from .cases import Case
from .models import MARGIN, FilledCache, last_only, random_tokens

#: Steps after which a filled cache is taken back; a few more fit into its margin.
ROUND = MARGIN // 2
#: How far below the best a chosen token's logit may lie, relative to the largest: eight bf16 roundings.
_NEAR_TIE = 8 * 2**-7


class CaseCall(Protocol):
    """A case, ready to run."""

    def __call__(self) -> torch.Tensor:
        """Run it once; logits [batch, vocabulary], or the generated tokens [batch, new]."""

    def rewind(self) -> None:
        """Make the next call do the same as the first."""


class Prefill:
    """A prompt, without a cache, down to the logits of its last position."""

    def __init__(self, model: Any, forward: Callable[..., Any], case: Case) -> None:
        self._forward = forward
        self._arguments = {"input_ids": random_tokens(model, case.batch, case.tokens), "use_cache": False,
                           **last_only(model)}  # fmt: skip

    def __call__(self) -> torch.Tensor:
        logits: torch.Tensor = self._forward(**self._arguments).logits[:, -1]
        return logits

    def rewind(self) -> None:
        """Nothing to do: a prompt leaves nothing behind."""


class Decode:
    """The step after a prompt; each call goes on by one position, up to ROUND and a few more."""

    def __init__(self, model: Any, forward: Callable[..., Any], case: Case) -> None:
        self._forward = forward
        self._cache = FilledCache(model, random_tokens(model, case.batch, case.tokens))
        self._arguments = {"input_ids": random_tokens(model, case.batch, 1), "use_cache": True,
                           **self._cache.argument, **last_only(model)}  # fmt: skip

    def __call__(self) -> torch.Tensor:
        logits: torch.Tensor = self._forward(**self._arguments).logits[:, -1]
        return logits

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        self._cache.rewind()


class Generate:
    """A greedy generation of a fixed length."""

    def __init__(self, model: Any, options: dict[str, Any], case: Case) -> None:
        self._model = model
        self._prompt = random_tokens(model, case.batch, case.tokens)
        self._model.generation_config.eos_token_id = None  # nothing but the length ends it
        self._options = {"max_new_tokens": case.new, "do_sample": False, "pad_token_id": 0,
                         "attention_mask": torch.ones_like(self._prompt), **options}  # fmt: skip

    def __call__(self) -> torch.Tensor:
        tokens: torch.Tensor = self._model.generate(self._prompt, **self._options)
        return tokens[:, self._prompt.shape[1] :]

    def rewind(self) -> None:
        """Nothing to do: every generation makes its cache anew."""

    def worst_gap(self, tokens: torch.Tensor) -> tuple[float, float]:
        """How far a chosen token's logit is below the best, and how far it may be.

        One pass over the whole text, without a cache, gives the logits at every position.

        Args:
            tokens: What the generation gave, [batch, new].
        """
        new = tokens.shape[1]
        text = torch.cat([self._prompt, tokens], dim=1)
        logits = self._model(input_ids=text, use_cache=False, **last_only(self._model, new + 1)).logits
        logits = logits[:, -new - 1 : -1].float()
        gaps = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
        return float(gaps.max()), _NEAR_TIE * float(logits.abs().max())
