"""Before: the rotary embedding of q and k, then the keys and v put into a cache, by index_copy_ at the same positions.
After:  one rotary_cache_write with three results; its writing form where the author writes into the cache.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head, and a cache of the keys' dtype.
"""

from __future__ import annotations

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}
