"""What is timed: the calls that generation is made of, each in several variants of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tilegym_fx.errors import UsageError, did_you_mean

Kind = Literal["prefill", "decode", "generate"]
Mode = Literal["eager", "compile", "graphs"]
Patch = Literal["none", "kernelize", "backend", "liger", "tilegym"]

DEFAULT_CASES = ("prefill:1x2048", "decode:1@2048", "generate:1x2048+64")
_SYNTAX = {
    "prefill": re.compile(r"(\d+)x(\d+)"),
    "decode": re.compile(r"(\d+)@(\d+)"),
    "generate": re.compile(r"(\d+)x(\d+)\+(\d+)"),
}
_EXAMPLES = "prefill:1x2048,4x4096 decode:1@2048,8@2048 generate:1x2048+64"


#: Sequences, tokens and new tokens of a dry run, at most.
SMALL = 2, 12, 4


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        kind: A prompt without a cache and with the last logits only; one token more against a filled static
            cache; or a whole ``generate()``.
        batch: Sequences.
        tokens: Length of the prompt, or entries in the cache.
        new: Tokens to generate.
    """

    kind: Kind
    batch: int
    tokens: int
    new: int = 0

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"decode:{self.batch}@{self.tokens}"
        return f"{self.kind}:{self.batch}x{self.tokens}" + (f"+{self.new}" if self.new else "")

    def small(self) -> Case:
        """Something like it that a CPU does in no time."""
        batch, tokens, new = SMALL
        return replace(self, batch=min(self.batch, batch), tokens=min(self.tokens, tokens), new=min(self.new, new))

    @property
    def tokens_per_call(self) -> int:
        """Tokens by which throughput is counted: those read in prefill, else those that come out."""
        return self.batch * {"prefill": self.tokens, "decode": 1, "generate": self.new}[self.kind]


def parse_cases(words: Iterable[str]) -> tuple[Case, ...]:
    """The cases of ``prefill:1x2048,4x4096 decode:1@2048 generate:1x2048+64``.

    Raises:
        UsageError: A word that is no case, or a size of zero.
    """
    cases: dict[Case, None] = {}
    for word in words:
        kind, _, sizes = word.partition(":")
        for size in sizes.split(","):
            cases[_parse(kind, size)] = None
    return tuple(cases)


def _parse(kind: str, size: str) -> Case:
    found = _SYNTAX[kind].fullmatch(size) if kind in _SYNTAX else None
    numbers = [int(number) for number in found.groups()] if found else []
    if numbers and 0 not in numbers:
        return Case(kind, *numbers)  # type: ignore[arg-type]
    fault, near = "is no phase", "" if kind in _SYNTAX else did_you_mean(kind, _SYNTAX)
    if numbers:
        fault = "is a phase of size 0"
    elif kind in _SYNTAX and not size:
        fault = "is a phase without its sizes"
    raise UsageError(f"{kind}:{size}".rstrip(":") + f" {fault}", advice=f"Write them like {_EXAMPLES}{near}")


@dataclass(frozen=True)
class Variant:
    """A way to run the model.

    Attributes:
        name: As users write it.
        mode: As it is; under torch.compile's default mode; or with CUDA graphs (``reduce-overhead``).
        patch: Who puts kernels into it.
        about: For tables and the documentation.
    """

    name: str
    mode: Mode
    patch: Patch
    about: str

    @property
    def is_ours(self) -> bool:
        return self.patch in ("kernelize", "backend")

    @property
    def is_baseline(self) -> bool:
        return self.patch == "none"

    @property
    def is_peer(self) -> bool:
        return not (self.is_ours or self.is_baseline)


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("eager", "eager", "none", "the model as transformers builds it"),
        Variant("eager+fx", "eager", "kernelize", "kernelize(model)"),
        Variant("compile", "compile", "none", "torch.compile"),
        Variant("compile+fx", "compile", "backend", 'torch.compile(backend="tilegym_fx")'),
        Variant("graphs", "graphs", "none", 'torch.compile(mode="reduce-overhead")'),
        Variant("graphs+fx", "graphs", "backend", 'torch.compile(backend="tilegym_fx", mode="reduce-overhead")'),
        Variant(
            "graphs+kernelize",
            "graphs",
            "kernelize",
            'kernelize(model), then torch.compile(mode="reduce-overhead")',
        ),
        Variant("liger", "eager", "liger", "Liger-Kernel's own patches"),
        Variant("tilegym", "eager", "tilegym", "TileGym's own patches"),
    )
}
DEFAULT_VARIANTS = ("eager", "eager+fx", "compile", "compile+fx", "graphs", "graphs+fx")
PEERS = tuple(name for name, variant in VARIANTS.items() if variant.is_peer)


def get_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in VARIANTS:
        raise UsageError(
            f"{name!r} is no variant", advice=f"Give some of {', '.join(VARIANTS)}{did_you_mean(name, VARIANTS)}"
        )
    return VARIANTS[name]
