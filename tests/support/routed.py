"""A mixture of experts of which two and two have nearly the same scores, so that any rounding turns its choices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, EXPERTS, CHOSEN, TOKENS = 32, 8, 3, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Routed(nn.Module):
    """A norm, a router, experts, and a last norm of the sum with what came in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = torch.randn(EXPERTS // 2, WIDTH).repeat_interleave(2, 0)
        self.router = nn.Parameter((rows + 1e-3 * torch.randn_like(rows)) * WIDTH**-0.5)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.norm, self.last = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(x)
        logits = F.linear(h, self.router)
        best, index = torch.topk(logits, CHOSEN, dim=-1)
        weights = torch.softmax(best, dim=-1, dtype=best.dtype)
        out = torch.einsum("tkoi,ti->tko", self.experts[index], h)
        x = x + (out * weights.unsqueeze(-1)).sum(1)
        return self.last(x), x


def routed() -> tuple[nn.Module, torch.Tensor]:
    """The module in bfloat16, and inputs."""
    return Routed().bfloat16(), torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def rounded_otherwise(value: torch.Tensor) -> torch.Tensor:
    """As near to the right value as a kernel's own rounding may be: one rounding beside it, here up and there down."""
    signs = torch.where(torch.arange(value.numel()).view(value.shape) % 3 == 0, 1.0, -1.0)
    return (value.float() * (1 + signs * torch.finfo(value.dtype).eps)).to(value.dtype)
