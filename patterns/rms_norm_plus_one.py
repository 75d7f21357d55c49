"""Before: cast((1 + weight) * x32 * rsqrt(mean(x32²) + eps)), a node for each operation.
After:  one rms_norm_plus_one.
Applies to any leading shape; the weight must be one value for each column.
"""
