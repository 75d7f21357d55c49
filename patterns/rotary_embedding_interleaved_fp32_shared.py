"""Before: for q and for k: to float32, x * cos + pairs of x turned * sin, cast back.
After:  one rotary_embedding_interleaved_fp32_shared with two results.
Applies to [batch, heads, length, head_dim] with cos and sin of [batch, 1, length, head_dim].
"""

SHAPES = {"cos": ("1 or B", "One", "S", "D"), "sin": ("1 or B", "One", "S", "D")}
