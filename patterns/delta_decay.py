"""Before: -exp(A_log32) * softplus(a32 + dt_bias).
After:  one delta_decay.
Applies to any leading shape.
"""
