"""Before: two linears of one input, gelu (tanh form) of the first, mul with the second.
After:  one linear_gelu_tanh_mul.
Applies where both weights have the same shape and no bias.
"""
