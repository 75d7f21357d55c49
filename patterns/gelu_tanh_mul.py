"""Before: gelu(gate, approximate="tanh") * up on two separate values.
After:  one gelu_tanh_mul.
Applies where gate and up have the same shape.
"""
