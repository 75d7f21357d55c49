"""Before: for q and for k: to float32, rotated by neighbouring pairs, cast back.
After:  one rotary_embedding_interleaved_fp32 with two results.
Applies to [batch, heads, length, head_dim] with cos and sin as wide as the head.
"""

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}
