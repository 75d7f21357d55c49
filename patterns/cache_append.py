"""Before: aten.cat of a cache and new keys or values along the tokens.
After:  one cache_append.
Applies to two 4-D tensors of one dtype whose other sizes agree.
"""

from __future__ import annotations

import torch

from tilegym_fx.spelling import guard


@guard
def one_dtype(cache: torch.Tensor, new: torch.Tensor) -> str | None:
    return None if cache.dtype == new.dtype else f"the cache is {cache.dtype}, the new tokens are {new.dtype}"
