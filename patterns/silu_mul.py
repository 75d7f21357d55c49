"""Before: silu(gate) * up on two separate values.
After:  one silu_mul.
Applies where gate and up have the same shape.
"""
