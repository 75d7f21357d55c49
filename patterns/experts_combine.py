"""Before: rows times their weights, back to the tokens' order, summed over the experts of each token.
After:  one experts_combine, which rounds once where weights of 16 bits round each row besides.
Applies to rows of [pairs, hidden] and weights of [tokens, experts of a token].
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def rows_are_pairs(rows: torch.Tensor, top_k_weights: torch.Tensor, order: torch.Tensor) -> str | None:
    if rows.dim() != 2 or top_k_weights.dim() != 2:
        return f"rows and weights have {rows.dim()} and {top_k_weights.dim()} dimensions, not 2"
    if order.dim() != 1 or order.shape[0] != rows.shape[0]:
        return f"the order is {list(order.shape)}, not one place for each of {rows.shape[0]} rows"
    if rows.shape[0] != top_k_weights.shape[0] * top_k_weights.shape[1]:
        return f"there are {rows.shape[0]} rows, and weights for {list(top_k_weights.shape)}"
    return None
