"""Before: keys and values rolled by one token, the new ones put into the last place, both copied back into the cache.
After:  one cache_roll_write with two results; its writing form where the author writes into the cache.
Applies to [batch, heads, length, head_dim] and one new token of the cache's dtype; values may have another width.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard, spelling

PLACE = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/cache_utils.py#L573-L588"


def _rolled(cache, new, last):
    return torch.ops.aten.index_put(cache.roll(-1, dims=-2), [None, None, last], new)


@spelling(source=PLACE)
def copied_back(k, v, keys, values):
    """The rolled keys and values are copied into the cache, which is what later steps read."""
    last = torch.full((1,), -1, dtype=torch.int64, device=keys.device)
    back = torch.ops.aten.copy
    return back(keys, _rolled(keys, k, last)), back(values, _rolled(values, v, last))


@guard
def one_dtype(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> str | None:
    if k.dtype == keys.dtype and v.dtype == values.dtype:
        return None
    return f"new keys and values are {k.dtype} and {v.dtype}, those of the cache {keys.dtype} and {values.dtype}"
