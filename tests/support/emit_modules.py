"""Small modules whose authors did something that a careless rewriter gets wrong. Used by test_emit and
test_apply."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 16
Tensor = torch.Tensor


class Norm(nn.Module):
    """Root mean square norm, spelled as Llama does."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x.to(torch.float32) * scale).to(x.dtype)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()


class Plain(WithNorm):
    """The ordinary case: residual add and norm."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + x
        residual = x
        x = self.norm(x)
        return x * 2, residual


class InPlaceAfter(WithNorm):
    """The norm's input is changed in place after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.norm(x)
        x.add_(3)
        return y + x


class InPlaceBetween(WithNorm):
    """The sum is changed in place between the add and the norm."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + x
        residual.mul_(2)
        y = self.norm(x)
        return y, x + residual


class UntakenReader(WithNorm):
    """A value from the middle of the region is read by a branch that the example does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, debug: bool = False) -> Any:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = self.weight * (x.to(torch.float32) * torch.rsqrt(variance + 1e-6)).to(x.dtype)
        if debug:
            return y, variance
        return y


class UntakenWriter(WithNorm):
    """A branch that the example does not take exchanges the residual."""

    def forward(self, x: Tensor, residual: Tensor, skip: bool = False) -> tuple[Tensor, Tensor]:
        kept = residual
        if skip:
            kept = residual * 0
        x = kept + x
        y = self.norm(x)
        return y, x


class ConditionalAlias(WithNorm):
    """Two names hold one value only on the path that the example takes."""

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        other = x * 2 if flag else x
        y = self.norm(x)
        return other + y


class TwoStreams(nn.Module):
    """Two residual streams, crossed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a = Norm()
        self.norm_b = Norm()

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = a + x
        b = b + a
        x = self.norm_a(a)
        x = self.norm_b(b) + x
        return x, a, b


class Loop(nn.Module):
    """The region stands in a loop over layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm(), Norm()])

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        for norm in self.norms:
            residual = residual + x
            x = norm(residual)
        return x


class InlineLoop(nn.Module):
    """A norm spelled out inside a loop that depends on its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = self.weight * (
                x.to(torch.float32) * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
            ).to(x.dtype)
        return x


class Walrus(WithNorm):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.norm(total := residual + x)
        return y + total


class Unpacked(WithNorm):
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, residual = pair
        x, residual = self.norm(residual + x), residual + x
        return x, residual


class TupleElement(WithNorm):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.norm(pair[0]) + pair[1]


class MultiLine(WithNorm):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return (
            self.norm(
                # the sum
                residual + x,
            )
            + 1
        )


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return function(self, *args, **kwargs) * 2

    return wrapper


class Decorated(nn.Module):
    """A decorator of the author's own wraps forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, 1e-6)


class NoGrad(nn.Module):
    """A decorator of torch's wraps forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        # keep this comment
        return normed(x, self.weight, 1e-6)  # and this one


class Property(nn.Module):
    """The norm hides in a property."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    @property
    def state(self) -> Tensor:
        return normed(self.held, self.weight, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        self.held = x
        return self.state + 1


class Child(Norm):
    """Calls its parent's forward through super()."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 3


class Lambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        norm = lambda value: normed(value, self.weight, 1e-6)  # noqa: E731
        return norm(x) + norm(x + 1)


class Nested(WithNorm):
    """A nested function reads a local of the region."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        def later() -> Tensor:
            return total * 2

        total = residual + x
        y = self.norm(total)
        return y + later()


class Shadowed(WithNorm):
    """Locals with the names of modules and of other values."""

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:
        torch = residual + input
        weight = residual
        hidden_states = self.norm(torch)
        return hidden_states + weight + torch


class NamedLikeUs(WithNorm):
    def forward(self, x: Tensor) -> Tensor:
        tilegym_fx = self.norm(x)
        return tilegym_fx + x


class WithBlock(WithNorm):
    """The value is rebound in a with block."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        with contextlib.nullcontext():
            hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states, residual


class InsideWith(WithNorm):
    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        with contextlib.nullcontext():
            hidden_states = residual + hidden_states
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        return hidden_states, residual


class Shared(nn.Module):
    """One norm held by two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Plain()
        self.second = Plain()
        self.second.norm = self.first.norm

    def forward(self, x: Tensor) -> Tensor:
        x, residual = self.first(x, x + 1)
        x, residual = self.second(x, residual)
        return x + residual


class TwoEps(nn.Module):
    """One class with two constants, written out as a literal in one method."""

    def __init__(self) -> None:
        super().__init__()
        self.small = Norm(1e-6)
        self.large = Norm(1e-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(x) * 2)


class EpsByName(nn.Module):
    """The constant that a path depends on is no attribute that the new text reads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.kind = "small" if size == 0 else "large"

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, 1e-6 if self.kind == "small" else 1e-1)


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([EpsByName(0), EpsByName(1), EpsByName(0)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Flag(nn.Module):
    """A plain argument chooses the maths inside a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, plus_one: bool = False, eps: float = 1e-6) -> Tensor:
        y = chosen(x, self.weight, plus_one, eps)
        return y + x


def chosen(x: Tensor, weight: Tensor, plus_one: bool, eps: float) -> Tensor:
    if plus_one:
        weight = weight + 1
    return normed(x, weight, eps)


class Dropped(nn.Module):
    """Dropout inside the region acts in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = Norm()

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + self.dropout(x)
        return self.norm(residual), residual


class DroppedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.dropout(self.act(self.gate(x)), 0.5, self.training)
        up = self.up(x)
        return gate * up


class Separate(nn.Module):
    """A gated activation in three statements."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        up = self.up(x)
        return gate * up


class Rebound(nn.Module):
    """The name that the gate's linear reads is bound anew by the statement in between."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        x = self.up(x)
        return gate * x


class StarredCall(WithNorm):
    """A size is given as a starred list."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.norm(x.view(*x.shape[:-1], -1)) + x
        return total.view(*x.shape)


class EarlyReturn(WithNorm):
    """A statement that may return stands in the middle of the region."""

    def forward(self, x: Tensor, residual: Tensor, stop: bool = False) -> Tensor:
        total = residual + x
        if stop:
            return total
        return self.norm(total) + total


class Guarded(WithNorm):
    """The region stands in a try block whose handler reads what it binds."""

    def forward(self, x: Tensor, residual: Tensor, fail: bool = False) -> tuple[Tensor, Tensor]:
        total = residual
        try:
            total = residual + x
            y = self.norm(total)
            if fail:
                raise ValueError
        except ValueError:
            return total, total
        return y, total


class Augmented(WithNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual * 1.5
        total += x
        return self.norm(total), total


class Locals(WithNorm):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = residual + x
        y = self.norm(total)
        return y + locals()["total"]


class Counting(WithNorm):
    """A dropped call would have counted itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seen: list[int] = []

    def helper(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x.to(torch.float32).pow(2).mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        variance = self.helper(x)
        return self.weight * (x.to(torch.float32) * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Twice(nn.Module):
    """One linear run twice, once on something else than a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x)) + self.norm(self.proj(x + 1))


class Choice(WithNorm):
    """The norm stands in one arm of a conditional expression."""

    def forward(self, x: Tensor, raw: bool = False) -> Tensor:
        return (x if raw else self.norm(x)) + 1


class Generator(WithNorm):
    def parts(self, x: Tensor) -> Any:
        yield self.norm(x)
        yield normed(x, self.norm.weight, 1e-6) * 2

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.parts(x))  # type: ignore[return-value]


class CachedBetween(nn.Module):
    """A cache is updated between the two statements of a region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor, residual: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = residual + x
        cache["last"] = x * 1
        residual = x
        x = self.norm(x)
        return x, residual


def chosen_with_docstring(x: Tensor, weight: Tensor, plus_one: bool) -> Tensor:
    """As `chosen`: a docstring is a statement that leaves no trace of having run."""
    if plus_one:
        return normed(x, weight + 1, 1e-6)
    return normed(x, weight, 1e-6)


class HelperWithDocstring(nn.Module):
    """The region lies two helpers deep, and the outer one chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, plus_one: bool = False) -> Tensor:
        y = chosen_with_docstring(x, self.weight, plus_one)
        return self.proj(y) + x


class AddsItsMask(nn.Module):
    """Eager attention: whatever mask it is given is added."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2)


class HandsItsMaskOn(nn.Module):
    """torch's attention takes a boolean mask as the kernel does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
        return attended.transpose(1, 2)


EPS = 1e-3


class EpsFromElsewhere(nn.Module):
    """The number comes out of a dict of the module, or is a global."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = {"eps": 1e-3, "kind": "rms"}
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.cfg["eps"])


class EpsFromAGlobal(EpsFromElsewhere):
    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, EPS)


class KindFromADict(EpsFromElsewhere):
    """An item of a dict chooses the maths inside a helper."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, 1e-3 if self.cfg["kind"] == "rms" else 1e-1)
