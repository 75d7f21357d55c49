"""Before: gelu(gate) * up on two separate values.
After:  one gelu_mul.
Applies where gate and up have the same shape.
"""
