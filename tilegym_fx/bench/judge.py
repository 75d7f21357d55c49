"""How far a variant's logits are from the original's, where a float32 run has judged all sequences, some or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tilegym_fx.verify import Check, compare

#: A prompt of more tokens takes a float32 model too long.
MOST_TOKENS = 16384


def judged_sequences(batch: int, tokens: int) -> int:
    """How many sequences of a batch a float32 model runs, each of so many tokens."""
    return min(batch, MOST_TOKENS // tokens)


@dataclass(frozen=True)
class Verdict:
    """What was compared.

    Attributes:
        checks: The sequences that a float32 run judged, then the others; all in one where there was none.
        judge: By what, in words.
    """

    checks: Sequence[Check]
    judge: str

    @property
    def failed(self) -> Check | None:
        """The first that does not pass."""
        return next((check for check in self.checks if not check.passed), None)

    def __str__(self) -> str:
        return f"{self.checks[0]} ({self.judge})"


def verdict(original: torch.Tensor, got: torch.Tensor, wide: torch.Tensor | None, dtype: torch.dtype) -> Verdict:
    """Compare last logits, [batch, vocabulary] each.

    The original's own error in the sequences that were run in float32 stands for that in the others, where two runs of
    which neither is exact may be as far apart as both errors together. A router turns its choice at a rounding, so that
    this is much for a mixture of experts, and a run that is as right as the original would fail without it.

    Args:
        original: In the model's dtype.
        got: Those of the variant.
        wide: In float32, of the first sequences; None without such a run.
        dtype: The model's.
    """
    if wide is None or not len(wide):
        return Verdict([_check("last logits", original, got, None, dtype)], "the original")
    count = len(wide)
    first = _check("last logits", original[:count], got[:count], wide, dtype)
    if count == len(original):
        return Verdict([first], "float32 run")
    others = _check("last logits of the other sequences", original[count:], got[count:], None, dtype)
    others = replace(others, allowed=max(others.allowed, first.allowed + (first.original_error or 0.0)))
    return Verdict([first, others], f"float32 run of {count} of {len(original)} sequences")


def _check(
    call: str, original: torch.Tensor, got: torch.Tensor, wide: torch.Tensor | None, dtype: torch.dtype
) -> Check:
    (check,) = compare({call: [original]}, {call: [got]}, None if wide is None else {call: [wide]}, dtype)
    return check
