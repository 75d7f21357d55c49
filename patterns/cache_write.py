"""Before: new keys and new values put into a cache, by index_copy_ at the same positions.
After:  one cache_write with two results; its writing form where the author writes into the cache.
Applies to [batch, heads, length, head_dim] and a cache of the same dtype; values may have a width of their own.
"""
