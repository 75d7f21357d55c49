"""Before: for q and for k: cat(left * cos - right * sin, right * cos + left * sin) of its two halves.
After:  one rotary_embedding_half_width with two results.
Applies to [batch, heads, length, head_dim] with cos and sin half as wide as the head.
"""

SHAPES = {"cos": ("1 or B", "S", "R"), "sin": ("1 or B", "S", "R")}
