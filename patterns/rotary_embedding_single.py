"""Before: x * cos + cat(-x[half:], x[:half]) * sin of one tensor whose heads stand beside the token.
After:  one rotary_embedding_single.
Applies to [batch, length, heads, head_dim] with cos and sin as wide as the head.
"""

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}
