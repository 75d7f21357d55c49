"""Before: two linears of one input, silu of the first, mul with the second.
After:  one linear_silu_mul.
Applies where both weights have the same shape and no bias.
"""
