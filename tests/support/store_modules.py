"""Objects whose methods keep what they compute, as a cache does, and modules that call them. Used by test_stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

Tensor = torch.Tensor


class Past:
    """Keeps keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.open, self.seen, self.calls, self.window = True, 0, 0, 3
        self.log: list[int] = []

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends along the tokens."""
        if not self.open:
            return keys, values
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.keys, self.values


class Swapped(Past):
    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.values, self.keys


class Counting(Past):
    """Does more than it gives, in between and afterwards."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += keys.shape[-2]
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        self.calls -= 1
        return self.keys, self.values


class Sliding(Past):
    """Keeps less than it gives."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += keys.shape[-2]
        all_keys = torch.cat([self.keys, keys], dim=-2)
        all_values = torch.cat([self.values, values], dim=-2)
        if self.open:
            self.keys = all_keys[:, :, -self.window + 1 :, :]
            self.values = all_values[:, :, -self.window + 1 :, :]
            return all_keys, all_values
        self.keys, self.values = all_keys, all_values
        return all_keys[:, :, -1:], all_values[:, :, -1:]


class CountsLate(Past):
    """Asks for the size of what it was given once the results have that name."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        self.seen += keys.shape[-2]
        return self.keys, self.values


class AsksLate(Past):
    """Goes by what it has just changed."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += keys.shape[-2]
        if self.seen > 4:
            return keys, values
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.keys, self.values


class Logging(Past):
    """Has an effect that nobody can follow."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(1)
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.keys, self.values


class Normed(Past):
    """Gives, and does not keep, something else besides."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        self.largest = self.keys.amax()
        return self.keys, self.values


class OtherWay(Past):
    """Keeps the values side by side."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-1)
        return self.keys, self.values


class Chained(Past):
    """The second store reads what the first one has stored."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.keys, values], dim=-2)
        return self.keys, self.values


class Unsaid(Past):
    """Gives something that it does not keep."""

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        return self.keys, torch.cat([self.values, values], dim=-2)


class Later(Past):
    """A subclass with the same update: it may have another one tomorrow, so it keeps its author's call."""


def _with_keys(past: Any) -> Any:
    return [(_pytree.GetAttrKey("keys"), past.keys), (_pytree.GetAttrKey("values"), past.values)], None


for _cls in (Past, *Past.__subclasses__()):
    _pytree.register_pytree_node(
        _cls,
        lambda past: ([past.keys, past.values], None),
        lambda parts, _, cls=_cls: cls(*parts),  # type: ignore[misc]
        flatten_with_keys_fn=_with_keys,
    )


class Appends(nn.Module):
    """What attention does with its cache."""

    def forward(self, keys: Tensor, values: Tensor, past: Past | None = None) -> tuple[Tensor, Tensor]:
        if past is not None:
            keys, values = past.update(keys, values)
        return keys * 2, values
