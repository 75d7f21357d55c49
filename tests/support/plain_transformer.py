"""A decoder written with nothing but `torch.nn`, as its users write one: whole operations, no model library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCABULARY = 64, 96
Norm = Callable[[], nn.Module]
Act = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """As many key heads as query heads, or fewer; under a mask, or each token before the next."""

    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.width, self.heads, self.key_heads = WIDTH // heads, heads, key_heads
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, key_heads * self.width, bias=False)
        self.values = nn.Linear(WIDTH, key_heads * self.width, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.keys(x).view(batch, length, self.key_heads, self.width).transpose(1, 2)
        v = self.values(x).view(batch, length, self.key_heads, self.width).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=self.heads != self.key_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to what went in."""

    def __init__(self, norm: Norm, act: Act, key_heads: int) -> None:
        super().__init__()
        self.first, self.second, self.act = norm(), norm(), act
        self.attention = Attention(4, key_heads)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear((2 if act is F.glu else 4) * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        x = x + self.attention(self.first(x), mask, scale)
        return x + self.down(self.act(self.up(self.second(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        norm: Makes each norm.
        acts: What each block has in its MLP.
        key_heads: Of the four query heads' attention.
        padding: Token id whose row of the table is not trained.
        scale: Of the attention; None for that of the width.
    """

    def __init__(
        self, norm: Norm, acts: Sequence[Act], key_heads: int = 4, padding: int | None = None,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList(Block(norm, act, key_heads) for act in acts)
        self.norm, self.head, self.scale = norm(), nn.Linear(WIDTH, VOCABULARY, bias=False), scale

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask, self.scale)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def decoder(
    norm: Norm, acts: Sequence[Act], *, key_heads: int = 4, padding: int | None = None, scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoder:  # fmt: skip
    """A decoder with random weights, norms' included, in eval mode."""
    torch.manual_seed(0)
    model = Decoder(norm, acts, key_heads, padding, scale).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
