"""Before: for q and for k: x * cos + pairs of x turned * sin.
After:  one rotary_embedding_interleaved with two results.
Applies to [batch, heads, length, head_dim] with cos and sin of [batch, 1, length, head_dim].
"""

SHAPES = {"cos": ("1 or B", "One", "S", "D"), "sin": ("1 or B", "One", "S", "D")}
