"""Before: cast(x32 * rsqrt(mean(x32²) + eps)), a node for each operation, or PyTorch's own rms_norm.
After:  one rms_norm_unweighted.
Applies to any leading shape.
"""
