"""Before: cast(weight * x32 * rsqrt(mean(x32²) + eps)), a node for each operation, or PyTorch's own rms_norm.
After:  one rms_norm_cast_last.
Applies to any leading shape; the weight must be one value for each column.
"""
