"""Further modules that a careless rewriter gets wrong, for kernelize as a whole. See also emit_modules."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from emit_modules import WIDTH, Norm, Tensor, WithNorm, normed
from torch import nn


class StarredCondition(WithNorm):
    """A condition over the elements of a list, and a list of sizes that is handed on with a star."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = [*x.shape[:-1], -1]
        y = self.norm(x.view(*sizes) if len([*sizes]) == 3 else x.reshape(-1, *x.shape[1:]))
        return y + x


def starred(x: Tensor, weight: Tensor, *rest: float) -> Tensor:
    eps = rest[0] if (*rest, 0.0)[0] > 0 else 1e-5
    return normed(x, weight, eps)


class StarredHelper(nn.Module):
    """A helper takes its constants as `*args` and chooses by them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, eps: tuple[float, ...] = (1e-6,)) -> Tensor:
        return starred(x, self.weight, *eps)


def scaled(x: Tensor, weight: Tensor, double: Any) -> Tensor:
    if double:
        x = x * 2
    return normed(x, weight, 1e-6)


class LooseOr(nn.Module):
    """A helper is given `a or b` and `a and b`, which bind less tightly than what a condition does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, a: Any = None, b: Any = None) -> Tensor:
        return scaled(x, self.weight, a or b) + scaled(x, self.weight, a and b)


def stepped(x: Tensor, weight: Tensor, step: int | None) -> Tensor:
    for _ in range(step or 0):
        x = x + 1
    return normed(x, weight, 1e-6)


class LooseNumber(nn.Module):
    """A helper is given a number that an expression of its caller makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, a: int = 0, b: int = 0) -> Tensor:
        return stepped(x, self.weight, a or b) + x


class Infinite(nn.Module):
    """A constant whose name is no literal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.limit = math.inf

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x) + x

    def _normed(self, x: Tensor) -> Tensor:
        if self.limit < 1e30:
            x = x.clamp(max=self.limit)
        return normed(x, self.weight, 1e-6)


class Message(WithNorm):
    """The region depends on a condition and stands beside a string of several lines."""

    def forward(self, x: Tensor, loud: bool = False) -> Tensor:
        text, y = (
            """one
        two""",
            scaled(x, self.norm.weight, loud),
        )
        return y + len(text)


class Alias(WithNorm):
    """The input of the norm is changed in place through another name, before and after."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        rows = x.view(-1, WIDTH)
        rows[0] += 3
        y = self.norm(x)
        rows[0] -= 3
        return y + x


class AliasInside(WithNorm):
    """The sum is changed through a view of it, between the add and the norm."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = residual + x
        first = total[:, :1]
        first.zero_()
        return self.norm(total) + total


class Deleted(WithNorm):
    """A local is deleted in the middle."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = residual + x
        del residual
        y = self.norm(total)
        del total
        return y


class Globals(WithNorm):
    """The constant of a path is a global that changes."""

    SCALE: ClassVar[list[float]] = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.norm.weight, Globals.SCALE[0] > 1) + x


class Matched(WithNorm):
    """A match statement."""

    def forward(self, x: Tensor, kind: str = "sum") -> Tensor:
        match kind:
            case "sum":
                total = x + x
                y = self.norm(total)
            case _:
                y = self.norm(x)
        return y


class Formatted(WithNorm):
    """The region stands in a string."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        text = f"{self.norm(x).shape}"
        return self.norm(x + 1), text


class Comprehended(nn.Module):
    """The regions stand in a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(1e-6), Norm(1e-2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(x) for norm in self.norms]).sum(0)


class Indexed(nn.Module):
    """One of several modules is chosen by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(1e-6), Norm(1e-2)])

    def forward(self, x: Tensor, residual: Tensor, which: int = 0) -> Tensor:
        total = x + residual
        return self.norms[which](total) + total


class Private(nn.Module):
    """Names that Python mangles."""

    def __init__(self) -> None:
        super().__init__()
        self.__weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.__weight, 1e-6) + x


class Renamed(WithNorm):
    """`forward` is another method under a second name."""

    def _call(self, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        return self.norm(total) * total

    forward = _call


class Partial(nn.Module):
    """The norm is a partial function held by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.norm = functools.partial(normed, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight) + x


class Tied(nn.Module):
    """One parameter under two names; only one of them is exchanged later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Norm()
        self.second = Norm()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x * 2)


class Gate(nn.Module):
    """Both halves of a gate read the name that the first half has just bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.gate(x))
        x = x * self.up(x)
        return x


class Swapped(WithNorm):
    """Names change places between the add and the norm."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        x, residual = total, x
        y = self.norm(x)
        return y, residual


class Kept(WithNorm):
    """The sum is stored on the module, which a later call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = x if self.last is None else self.last
        total = x + before
        self.last = total.detach()
        return self.norm(total)


class Default(WithNorm):
    """A default argument that is a list, filled by each call."""

    def forward(self, x: Tensor, seen: list[int] = [1]) -> Tensor:  # noqa: B006 - the author's mistake
        y = scaled(x, self.norm.weight, len(seen) > 2)
        seen.append(0)
        return y


EPS = (1e-6,)


class Defaults(nn.Module):
    """Defaults that a new function gets again, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, eps: Any = EPS, scale: float = -1.0, *, dtype: Any = torch.float32) -> Tensor:
        return normed(x, self.weight, 1e-6) * scale + len(eps) + torch.ones(1, dtype=dtype)


class Broadcast(WithNorm):
    """The residual of another call is wider than that of the example."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total), total


class Conditional(WithNorm):
    """A short circuit chooses between two norms."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = other is not None and self.norm(other)
        return self.norm(x) if y is False else y + x


class Raised(WithNorm):
    """Dropped code raises where the example did not."""

    def _checked(self, x: Tensor, limit: int) -> Tensor:
        if x.shape[1] > limit:
            raise ValueError("too long")
        return self.norm(x)

    def forward(self, x: Tensor, limit: int = 10) -> Tensor:
        return self._checked(x + x, limit)


class Switched(WithNorm):
    """A gradient switch stands around a part of the region."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        with torch.no_grad():
            total = x + residual
        return self.norm(total) + total


class AddsItsMaskBetween(nn.Module):
    """A statement of the author's inside the region: no condition can be written around all of it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask
        gate = torch.sigmoid(v)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2), gate
