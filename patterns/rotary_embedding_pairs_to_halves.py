"""Before: for q and for k: cat(one * cos - two * sin, two * cos + one * sin) of x[::2] and x[1::2].
After:  one rotary_embedding_pairs_to_halves with two results.
Applies to [batch, heads, length, rotated columns] with cos and sin as wide, of which the first half is read.
"""

SHAPES = {"cos": ("1 or B", "S", "D"), "sin": ("1 or B", "S", "D")}
